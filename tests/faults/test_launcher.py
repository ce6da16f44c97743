"""torchrun or ddp_train.py --processes is killed, and terminals are closed.

After SIGKILL of a launcher (by the out-of-memory killer, or by a closing container), no process is left that could stop
its ranks. A terminal that closes sends SIGHUP to the launcher alone, because its ranks have their own sessions.
"""

from __future__ import annotations

import itertools
import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.runs.checkpoints import list_checkpoints
from tests.support.jobs import for_each
from tests.support.launch import Workshop, metrics, wait_until
from tests.support.same_end import assert_same_end
from tests.support.straight import FAULTS, SETTINGS, STEPS
from tests.support.torchrun import MARK, Torchrun, with_faults

GONE_SECONDS = 15


@pytest.fixture(scope="module")
def shop(straight_shop: Workshop) -> Workshop:
    # Ranks must not mistake a torchrun that has ended for one that is frozen, even with a short time-out for stuck
    # ranks.
    return Workshop(straight_shop.path, {"COLLECTIVE_TIMEOUT_SECONDS": "10"})


# Runs before ddp_train.py. Rank 0 writes the mark file, and then waits.
NOTE = "import os, time\nif os.environ['RANK'] == '0': open({mark!r}, 'w').write('x')\n"
IN_AN_IMPORT = """
import importlib.abc, os, sys, time
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            if os.environ["RANK"] == "0":
                open({mark!r}, "w").write("x")
            time.sleep(60)
sys.meta_path.insert(0, Slow())
"""


@dataclass(frozen=True)
class Place:
    """Place at which a rank is when torchrun is killed, and the checkpoint that is left afterwards."""

    name: str
    prelude: str  # {mark}: the file that the rank writes at this place
    step: int | None = None  # the step of the checkpoint that is left, None if training has not begun
    faults: str = FAULTS
    says: str = ""


ENDED = " has ended (killed?)"
PLACES = [
    Place("python's start", NOTE + "time.sleep(4)\n", faults=""),
    Place("an import", IN_AN_IMPORT, faults="", says=ENDED),
    Place("the rendezvous", "before(START, note({mark!r}), rank=0)\nbefore(START, pause(60), rank=1)", says=ENDED),
    Place("the check of the data", "before(CHECK, note({mark!r}, pause(60)), rank=0)", says=ENDED),
    Place("the first step", "before(STEP, note({mark!r}, until({go!r})), rank=0, step=0)", step=0),
    Place("a step", "before(STEP, note({mark!r}, until({go!r})), rank=1, step=5)", step=5),
    Place("a step without end", "before(STEP, note({mark!r}, spin), rank=0, step=5)", 3, says="a new checkpoint"),
    Place("a validation", "before(EVALUATION, note({mark!r}, until({go!r})), rank=0, step=6)", step=6),
    Place("a save", "before(WRITE, note({mark!r}, until({go!r})), rank=0, step=6)", step=6),
    Place("the end", "before(END, note({mark!r}, until({go!r})), rank=0)", step=STEPS - 1),
]
FEW = {"python's start": False, "an import": True, "a save": False, "a step": True}  # whether under --processes


def kill_launcher(shop: Workshop, straight: Path, place: Place, *, by_processes: bool) -> None:
    """Kill the launcher when a rank has reached `place` in the program, and resume the run to its end."""
    run = shop.add_run(f"killed-{by_processes}-" + place.name.replace("'", "").replace(" ", "-"), **SETTINGS)
    mark = shop.path / f"{run.name}.mark"
    go = mark.with_suffix(".go")
    job = Torchrun(shop, run, by_processes=by_processes)
    prelude = place.prelude.replace("{mark!r}", repr(str(mark))).replace("{go!r}", repr(str(go)))
    process = job.start(prelude, faults=place.faults)
    wait_until(mark.exists, process)
    process.kill()
    time.sleep(1)
    go.touch()
    job.seconds_to_the_end(GONE_SECONDS)
    said = process.read(".err")
    assert "Traceback" not in said, said
    assert len(said) < 2000, said  # no stack traces of libraries that cannot reach torchrun's store
    assert place.says in said
    made = [step for step, _ in list_checkpoints(run / "checkpoints")]
    if place.step is None:
        assert not made
    else:
        assert max(made) in (place.step, place.step + 1), (place, made)
        assert not list((run / "checkpoints").glob(".*"))
        if max(made) < STEPS - 1 and not place.says:
            assert "stopped by SIGHUP (" in said, said
            assert "the launcher or the reader of the output is gone) after global step" in said, said
    shop.train(run.name, prelude=FAULTS)
    assert_same_end(straight, run)


@pytest.mark.slow
@pytest.mark.fault(
    "torchrun or --processes is killed",
    "at ten places: all ranks end within 15 s; resumed to the same end",
)
def test_torchrun_killed_anywhere(shop: Workshop, straight: Path, exhaustive: bool) -> None:
    every = itertools.product(PLACES, (False, True))
    cases = [
        (place, by_processes) for place, by_processes in every if exhaustive or FEW.get(place.name) == by_processes
    ]
    for_each(cases, lambda case: kill_launcher(shop, straight, case[0], by_processes=case[1]), at_once=2)


@pytest.mark.slow
def test_the_same_command_waits_for_ranks_that_leave(shop: Workshop, straight: Path) -> None:
    """A command that is started right after the kill waits for the old ranks, which are still writing their
    checkpoint."""
    run, mark = shop.add_run("impatient", **SETTINGS), shop.path / "impatient.mark"
    process = Torchrun(shop, run, are_forked=True).start(
        f"before(WRITE, note({str(mark)!r}, pause(4)), rank=0, step=3)"
    )
    wait_until(mark.exists, process)
    process.kill()
    shop.train(run.name, prelude=FAULTS)
    assert_same_end(straight, run)


# Terminals

# Makes the terminal the controlling one of the process, so that its closing sends SIGHUP.
ENTER_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@dataclass(frozen=True)
class Hangup:
    """Command of a run on a terminal that is closed, and whether the run outlives the terminal."""

    name: str
    command: tuple[str, ...]
    continues: bool = False
    options: tuple[str, ...] = ()


HANGUPS = [
    Hangup("torchrun", tuple(TORCHRUN)),
    Hangup("nohup torchrun", ("nohup", *TORCHRUN)),
    Hangup(
        "nohup torchrun that is told to leave SIGHUP alone",
        ("nohup", *TORCHRUN, "--signals-to-handle=SIGTERM,SIGINT,SIGQUIT"),
        continues=True,
    ),
    Hangup("--processes", (sys.executable,), options=("--processes", "2")),
    Hangup("nohup --processes", ("nohup", sys.executable), continues=True, options=("--processes", "2")),
    Hangup("python", (sys.executable,)),
    Hangup("nohup python", ("nohup", sys.executable), continues=True),
]


def close_terminal(shop: Workshop, hangup: Hangup) -> None:
    ranks = 2 if "torch.distributed.run" in hangup.command or hangup.options else 1
    name, tokens = "closed-" + hangup.name.replace(" ", "-"), {"min_train_tokens": STEPS * 64 * ranks}
    run = shop.add_run(name, **SETTINGS | tokens)
    mark = shop.path / f"{run.name}.mark"
    go = mark.with_suffix(".go")
    prelude = f"{FAULTS}before(STEP, note({str(mark)!r}, until({str(go)!r})), rank=0, step=4)"
    arguments = [run.name, str(shop.datasets), "--runs-dir", str(shop.runs), *hangup.options]
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    process = subprocess.Popen(
        [sys.executable, "-c", ENTER_TERMINAL, *hangup.command, str(with_faults(shop, run, prelude)), *arguments],
        cwd=shop.path,
        env=shop.variables({MARK: str(run)}),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    deadline = time.monotonic() + 100
    while not mark.exists():
        assert process.poll() is None, os.read(master, 1 << 20)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.close(master)  # now the kernel sends SIGHUP to the command
    time.sleep(1)
    go.touch()
    job = Torchrun(shop, run)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:  # seen once in dozens of runs, with torchrun
        pytest.fail(f"alive 60 s after its terminal was closed:\n{job.describe()}")
    job.seconds_to_the_end(GONE_SECONDS)
    last = max(step for step, _ in list_checkpoints(run / "checkpoints"))
    assert last == STEPS - 1 if hangup.continues else last in (4, 5), (hangup, last)
    shop.train(run.name, ranks=ranks, prelude=FAULTS)
    assert len([event for event in metrics(run) if event["event"] == "validation"]) == 5


@pytest.mark.slow
@pytest.mark.fault(
    "a terminal is closed",
    "stops with a checkpoint; under nohup it continues (torchrun must also be told not to handle SIGHUP)",
)
def test_a_terminal_is_closed(shop: Workshop, exhaustive: bool) -> None:
    few = [hangup for hangup in HANGUPS if hangup.name in ("torchrun", "--processes")]
    for_each(HANGUPS if exhaustive else few, lambda hangup: close_terminal(shop, hangup), at_once=2)


@pytest.mark.slow
@pytest.mark.fault("the process that reads the output ends", "stops with a checkpoint")
def test_the_reader_of_the_output_ends(shop: Workshop) -> None:
    """A run stops when the reader of its output ends, as `tee` in `… | tee log` does when its terminal is closed."""
    run, mark = shop.add_run("unread", **SETTINGS), shop.path / "unread.mark"
    go, pipe = mark.with_suffix(".go"), shop.path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    output = f"import os\nfor stream in (1, 2):\n    os.dup2(os.open({str(pipe)!r}, os.O_WRONLY), stream)\n"
    noting = f"before(STEP, note({str(mark)!r}, until({str(go)!r})), step=2)"
    (process,) = shop.start(run.name, ranks=1, prelude=output + FAULTS + noting)
    wait_until(mark.exists, process)
    os.close(reader)
    go.touch()
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    # The run notices it at its next line of output, which is the report after step 2.
    assert max(step for step, _ in list_checkpoints(run / "checkpoints")) in (2, 3)
    shop.train(run.name, ranks=1, prelude=FAULTS)
