"""A run as its user sees it on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness.training.reporter import Console
from tests.support.launch import PATIENCE_SECONDS, ROOT, Workshop, finish
from tests.support.warm import FORK_PYTHONS

# Runs before ddp_train.py, and connects the process's output to the terminal.
ENTER = "import os\nfor stream in (1, 2): os.dup2(os.open({name!r}, os.O_RDWR | os.O_NOCTTY), stream)\n"
# Also makes the terminal the controlling one, so that Ctrl-C sends SIGINT to the process.
ENTER_IN_FRONT = ENTER.replace(" | os.O_NOCTTY", "")
CTRL_C = b"\x03"


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """A terminal: the descriptor from which its screen is read, and its name."""
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    settings = termios.tcgetattr(slave)
    settings[3] |= termios.NOFLSH  # otherwise Ctrl-C drops the output that a test has not read yet
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    yield master, os.ttyname(slave)
    os.close(slave)
    os.close(master)


def screen(master: int) -> list[str]:
    """Return the lines of the screen. A bar overwrites its own line, so that only its last state is returned."""
    text = b""
    with suppress(BlockingIOError, OSError):  # OSError if the terminal's first process has ended
        while True:
            text += os.read(master, 1 << 16)
    return [line.rpartition("\r")[2] for line in text.decode().replace("\r\n", "\n").split("\n")]


@pytest.mark.parametrize(
    ("columns", "shown"),
    [(50, "loss left"), (66, "loss left $"), (80, "loss tps left $"), (120, "loss tps left $ norm")],
)
def test_the_bar_leaves_out_whole_numbers(
    terminal: tuple[int, str], monkeypatch: pytest.MonkeyPatch, columns: int, shown: str
) -> None:
    """Without the last digits that do not fit, a number would be another one."""
    master, name = terminal
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    values = {"loss": "3.720", "tps": "1,234,480", "left": "58:12", "$": "112.34 of 400.00", "norm": "12.31"}
    with open(name, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        console = Console(15_999, 7_200, visible=True)
        console.start()
        console.show(7_200, values)
        console.advance()
        console.close()
    lines = [line.partition(", ")[2] for line in screen(master) if line.strip()]
    assert lines == [" ".join(f"{key} {values[key]}" for key in shown.split())]


def test_a_run_on_a_terminal(shop: Workshop, terminal: tuple[int, str]) -> None:
    """The progress bar begins on a line below the first messages. The summary and the next commands have lines of their
    own, too."""
    master, name = terminal
    shop.add_run(price_per_hour=0.1)  # a minute costs less than half a cent
    finish(shop.start(ranks=1, prelude=ENTER.format(name=name)), expect=0, timeout=60)
    lines = screen(master)
    assert lines[0] == "r: starting 1 process"
    assert lines[1].startswith("r: ")
    assert lines[1].endswith(" global steps of 64 tokens")
    (bar,) = [line for line in lines if "|" in line]
    assert len(bar) <= 80
    assert re.match(r"100%\|.+\| 20/20, loss \d\.\d{3} tps [\d,]+ lr 0\.0004 left 00:00 \$ 0\.00 of 0\.00", bar), bar
    assert "global step 19: validation loss" in "\n".join(lines)
    summary = lines.index("Next:")
    assert lines[summary - 1] == ""
    assert lines[summary + 1 : summary + 3] == [
        f"  uv run test_smoke.py r --runs-dir {shop.runs}",
        f"  uv run test_loss.py {shop.datasets} r --runs-dir {shop.runs}",
    ]
    assert not "".join(lines[summary + 3 :])


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_is_closed_from_the_beginning(shop: Workshop, stream: str) -> None:
    """A run completes if standard output or standard error is closed from the beginning. Python then has None in place
    of the closed stream."""
    run = shop.add_run()
    finish(shop.start(ranks=1, prelude=f"import sys\nsys.{stream} = None\n"), expect=0, timeout=60)
    assert (run / "summary.json").exists()


def test_a_stream_that_lacks_a_character(tmp_path: Path) -> None:
    """A character that standard output cannot encode is written as an escape sequence."""
    shop = Workshop(tmp_path / "données")
    shop.add_dataset()
    shop.add_run()
    said = finish(
        shop.start(ranks=1, prelude="import sys\nsys.stdout.reconfigure(encoding='ascii')\n"), expect=0, timeout=60
    )
    assert "donn\\xe9es" in said.stdout


@pytest.mark.parametrize("when", ["starting 2 processes", "global step 5: validation"])
def test_ctrl_c_ends_with_how_to_continue(tmp_path: Path, terminal: tuple[int, str], when: str) -> None:
    """Ctrl-C pressed twice under --processes ends with the line that says how to continue."""
    master, name = terminal
    shop = Workshop(tmp_path)
    shop.add_dataset(tokens=200_000)
    shop.add_run(min_train_tokens=190_000)
    words = [str(ROOT / "ddp_train.py"), "r", str(shop.datasets), "--runs-dir", str(shop.runs), "--processes", "2"]
    process = shop.fork(words, {}, ENTER_IN_FRONT.format(name=name) + FORK_PYTHONS)
    lines, deadline = [""], time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None:
        assert time.monotonic() < deadline, lines
        more = screen(master)
        lines = [*lines[:-1], lines[-1] + more[0], *more[1:]]
        if when and when in "\n".join(lines[:-1]):  # Ctrl-C discards what the terminal has not shown of a line
            when = ""
            for _ in range(2):
                os.write(master, CTRL_C)
                time.sleep(0.05)
    first, *more = screen(master)
    lines = [*lines[:-1], lines[-1] + first, *more]
    assert process.returncode == 130, lines
    assert "Traceback" not in "\n".join(lines)
    text = "\n".join(lines).replace("^C", "")  # without the terminal's own echo
    # The forked ranks loaded torch before its log level was set, so that it may print where a connection broke.
    own = [
        line
        for line in text.rstrip().split("\n")
        if not re.match(r"frame #|\[W|Exception raised from|<omitting python frames>", line)
    ]
    last = next(line for line in reversed(own) if line.strip())
    assert last.startswith("stopped by SIGINT")
    assert "to continue, run the same command again" in last
