"""What a user sees of a run on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.launch import Workshop, finish

# In the process that is to be on the terminal, before ddp_train.py.
ENTER = "import os\nfor stream in (1, 2): os.dup2(os.open({name!r}, os.O_RDWR | os.O_NOCTTY), stream)\n"


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """A terminal: the descriptor on which its screen is read, and its name."""
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    yield master, os.ttyname(slave)
    os.close(slave)
    os.close(master)


def screen(master: int) -> list[str]:
    """The lines, each as it was when the next one began: a bar overwrites its own."""
    text = b""
    with suppress(BlockingIOError):
        while True:
            text += os.read(master, 1 << 16)
    return [line.rpartition("\r")[2] for line in text.decode().replace("\r\n", "\n").split("\n")]


def test_a_run_on_a_terminal(tmp_path: Path, terminal: tuple[int, str]) -> None:
    """The bar begins below what is said before it, and leaves the summary and the next commands to stand alone."""
    master, name = terminal
    shop = Workshop(tmp_path)
    shop.add_dataset()
    shop.add_run(price_per_hour=10.32)
    finish(shop.start(ranks=1, prelude=ENTER.format(name=name)), expect=0, timeout=60)
    lines = screen(master)
    assert lines[0] == "r: starting 1 process"
    assert lines[1].startswith("r: ")
    assert lines[1].endswith(" global steps of 64 tokens")
    (bar,) = [line for line in lines if "|" in line]
    assert bar.startswith("steps done: 100%")
    assert "20/20" in bar
    assert "global step 19: validation loss" in "\n".join(lines)
    summary = lines.index("Next:")
    assert lines[summary - 1] == ""
    assert lines[summary + 1 : summary + 3] == [
        f"  uv run test_smoke.py r --runs-dir {shop.runs}",
        f"  uv run test_loss.py {shop.datasets} r --runs-dir {shop.runs}",
    ]
    assert not "".join(lines[summary + 3 :])


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_is_closed_from_the_beginning(tmp_path: Path, stream: str) -> None:
    """Python then has None in its place."""
    shop = Workshop(tmp_path)
    shop.add_dataset()
    run = shop.add_run()
    finish(shop.start(ranks=1, prelude=f"import sys\nsys.{stream} = None\n"), expect=0, timeout=60)
    assert (run / "summary.json").exists()
