"""Many small jobs at a time, for tests that inject faults at many places."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from harness.runs import checkpoints
from tests.support.launch import Process, Result, Workshop, finish

Case = TypeVar("Case")
Found = TypeVar("Found")

# A case mostly waits until one rank notices that another has ended, which takes seconds without torchrun.
JOBS_AT_ONCE = 12
VANISH_SECONDS = 15
# SIGUSR1 makes a rank that does not end print where it is.
SAY_WHERE = "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR1, all_threads=True)\n"
# Without --exhaustive, ranks notice sooner than usual that another rank has ended.
HASTE = "import harness.distributed.watchdog as w\nw.POLL_SECONDS, w.GONE_PATIENCE_SECONDS = 0.3, 0.5\n"
BEFORE_ALL = [SAY_WHERE]


def set_pace(exhaustive: bool) -> None:
    BEFORE_ALL[:] = [SAY_WHERE] if exhaustive else [SAY_WHERE, HASTE]


def for_each(cases: Iterable[Case], test: Callable[[Case], Found], at_once: int = JOBS_AT_ONCE) -> list[Found]:
    """Call `test` with each of the cases, several at a time, and return its results in the order of `cases`. Raises the
    error of the first case in this order that fails."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(test, cases))  # cancels the cases that have not begun once one has failed


def start(shop: Workshop, *arguments: str, ranks: int = 1, prelude: str = "") -> Sequence[Process]:
    """Start ranks as Workshop.start does. Any thread may call this."""
    return shop.start(*arguments, ranks=ranks, prelude="".join(BEFORE_ALL) + prelude)


def train(shop: Workshop, *arguments: str, ranks: int = 1, timeout: float = 100) -> Result:
    """Train to the end, as Workshop.train does. Any thread may call this."""
    return finish(start(shop, *arguments, ranks=ranks), expect=0, timeout=timeout)


def wait_for(process: Process, timeout: float) -> int:
    """Return the exit status of a process. A process that does not end in time is killed, and the test fails."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)
        threading.Event().wait(1)
        process.kill()
        pytest.fail(f"it did not end within {timeout} s: {process.communicate(timeout=10)}")


def ends_of(processes: Sequence[Process], timeout: float) -> Result:
    """Return rank 0's exit status and output. After rank 0 has ended, the other ranks have `timeout` seconds to end by
    themselves."""
    status = wait_for(processes[0], 100)
    for process in processes[1:]:
        wait_for(process, timeout)
    return Result(status, *said(processes)[0])


def said(processes: Sequence[Process]) -> list[tuple[str, str]]:
    return [process.communicate(timeout=VANISH_SECONDS) for process in processes]


def assert_named_are_whole(run: Path) -> None:
    """Verify that `latest`, `best` and all other checkpoints of a run are complete and undamaged."""
    folder = run / "checkpoints"
    links = [folder / name for name in ("latest", "best") if (folder / name).is_symlink()]
    for path in [*links, *(path for _, path in checkpoints.list_checkpoints(folder))]:
        checkpoints.verify_checkpoint(path)
