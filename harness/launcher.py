"""The torchrun that started this process, and how the process ends when that has ended.

torchrun ends its ranks when it leaves in good order. When it is killed (by the out-of-memory killer, by a container
that closes) nobody does, and nobody would see their output, restart them or stop them: they would train on at the price
of the machine, or wait for hours at a rendezvous whose store has died with torchrun. So each rank looks after its
parent itself, in a thread, from its first line on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.errors import LEAVING, TOLD

POLL_SECONDS = 0.5
# For the step that is under way and its checkpoint; with what noticing takes, all ranks are gone 15 s after torchrun.
ENDING_SECONDS = 12.0

_parent: int | None = None  # this process's parent while that is to be looked after: the pid of torchrun
_ask_to_stop: Callable[[], None] | None = None


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_torchrun() -> None:
    """From here on this process ends soon after the torchrun that started it, if one did."""
    global _parent
    if _parent is not None or not started_by_torchrun():
        return
    _parent = os.getppid()
    if _is_orphan():  # torchrun was killed before this line was reached
        _leave("")
    threading.Thread(target=_look_after_parent, daemon=True, name="launcher").start()


def is_gone() -> bool:
    """Whether the torchrun that started this process has ended."""
    return _parent is not None and os.getppid() != _parent


def ask_before_the_end(ask: Callable[[], None]) -> None:
    """Once torchrun has ended call `ask`, in another thread than this one, and give the process ENDING_SECONDS to end
    by itself. Without such a function it is ended at once."""
    global _ask_to_stop
    _ask_to_stop = ask


def _look_after_parent() -> None:
    while not is_gone():
        time.sleep(POLL_SECONDS)
    if _ask_to_stop is None:
        _leave("")
    else:
        _ask_to_stop()
        time.sleep(ENDING_SECONDS)
        _leave(f" before a checkpoint was written in {ENDING_SECONDS:g} s")


def _leave(where: str) -> None:
    told = TOLD.is_set() or LEAVING.is_set()
    TOLD.set()
    if os.environ.get("LOCAL_RANK") == "0" and not told:
        with suppress(OSError):  # whoever read it may be gone, too
            print(
                f"\nerror: torchrun has ended (killed?){where}, and its processes with it; run the same command again "
                "to continue",
                file=sys.stderr,
                flush=True,
            )
    os._exit(1)


def _is_orphan() -> bool:
    """Whether torchrun is no ancestor of this process any more. It runs the same Python; there may be a wrapper (a
    profiler, say) between it and its worker."""
    if "PYTHON_EXEC" in os.environ:  # torchrun's own variable for workers that run another one
        return False
    try:
        own, pid = os.readlink("/proc/self/exe"), os.getppid()
        while pid > 0:
            with suppress(PermissionError):  # another user's: not the torchrun of this process
                if os.readlink(f"/proc/{pid}/exe") == own:
                    return False
            pid = int(_stat(pid)[1])
    except OSError:  # no /proc, or a part of it: not to be known
        return False
    return True


def launcher_name() -> str:
    """The process that started this one and that would start another in its place: its pid, and its time of start,
    since each container may have a torchrun with pid 1. Empty without torchrun."""
    if not started_by_torchrun():
        return ""
    pid = os.getppid()
    return f"{pid} {_started(pid)}".strip()


def has_ended(name: str) -> bool:
    """Whether the torchrun of this machine that `launcher_name` called `name` is known to have ended."""
    pid, _, started = name.partition(" ")
    return pid.isdigit() and started.isdigit() and _started(int(pid)) != started


def _started(pid: int) -> str:
    with suppress(OSError):
        fields = _stat(pid)
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def _stat(pid: int) -> list[str]:
    """proc(5), stat, from field 3, the state, on: before it comes the name, which may hold anything, brackets too."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
