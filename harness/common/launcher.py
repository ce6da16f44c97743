"""The torchrun that started this process, and how the process ends when that has ended.

torchrun ends its ranks when it leaves in good order. When it is killed (by the out-of-memory killer, by a container
that closes) nobody does, and nobody would see their output, restart them or stop them: they would train on at the price
of the machine, or wait for hours at a rendezvous whose store has died with torchrun. So each rank looks after its
torchrun itself, in a thread, from its first line on.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from harness.common.errors import tell_soon
from harness.common.exit import EXIT
from harness.common.processes import ancestors, start_time

POLL_SECONDS = 0.5
# For the step that is under way and its checkpoint; with what noticing takes, all ranks are gone 15 s after torchrun.
ENDING_SECONDS = 12.0
# What torchrun is called by: a command, a module, and the file that this is.
COMMAND = "torchrun"
MODULES = ("torch.distributed.run", "torch.distributed.launch")
FILE = os.path.join("torch", "distributed", "run.py")


@dataclass(frozen=True)
class Launcher:
    """A process, this one's parent or further up. `started` is its time of start as the system counts, since pids are
    given anew, and each container may have a torchrun with pid 1; empty where that is not to be known."""

    pid: int
    started: str

    def has_ended(self) -> bool:
        if self.started:
            return start_time(self.pid) != self.started
        return os.getppid() != self.pid


_launcher: Launcher | None = None  # what this process looks after
_ask_to_stop: Callable[[], None] | None = None


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def exit_when_torchrun_dies() -> None:
    """From here on this process ends soon after the torchrun that started it, if one did."""
    global _launcher
    if _launcher is not None or not started_by_torchrun():
        return
    _launcher = _find_launcher()
    if _is_orphan(_launcher):  # torchrun was killed before this line was reached
        _leave("")
    threading.Thread(target=_look_after_launcher, daemon=True, name="launcher").start()


def is_gone() -> bool:
    """Whether the torchrun that started this process has ended."""
    return _launcher is not None and _launcher.has_ended()


def on_torchrun_death(ask: Callable[[], None]) -> None:
    """Once torchrun has ended call `ask`, in another thread than this one, and give the process ENDING_SECONDS to end
    by itself. Without such a function it is ended at once."""
    global _ask_to_stop
    _ask_to_stop = ask


def _look_after_launcher() -> None:
    while not is_gone():
        time.sleep(POLL_SECONDS)
    if _ask_to_stop is None:
        _leave("")
    else:
        _ask_to_stop()
        time.sleep(ENDING_SECONDS)
        _leave(f" before a checkpoint was written in {ENDING_SECONDS:g} s")


def _leave(where: str) -> None:
    is_told = EXIT.is_explained or EXIT.has_own_reason
    EXIT.note_explained()
    if os.environ.get("LOCAL_RANK", "0") == "0" and not is_told:
        tell_soon(
            f"torchrun has ended (killed?){where}, and its processes with it; run the same command again to continue"
        )
    os._exit(1)


def _find_launcher() -> Launcher:
    """The torchrun above this process; between them there may be a wrapper: a shell, a profiler. Where none is to be
    seen (a program of the user's that does torchrun's work, a container's border), the parent."""
    found = next((pid for pid in ancestors() if _is_torchrun(pid)), os.getppid())
    return Launcher(found, start_time(found))


def _is_torchrun(pid: int) -> bool:
    """Whether a Python there runs torchrun's script or module: others may have its name among their arguments."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[1:]
        while words and words[0].startswith("-") and words[0] != "-m":
            words.pop(0)
        if words[:1] == ["-m"]:
            return words[1] in MODULES
        return bool(words) and (PurePath(words[0]).name == COMMAND or words[0].endswith(FILE))
    return False


def _is_orphan(launcher: Launcher) -> bool:
    """Whether torchrun has ended already: it is not above this process, and the store that it keeps does not answer.
    On other machines than the store's that is not to be known."""
    keeps_store = os.environ.get("GROUP_RANK") == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not keeps_store or _is_torchrun(launcher.pid):
        return False
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(address, timeout=ENDING_SECONDS / 2).close()
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError, ValueError):  # for others to tell
        return False
    return False


def launcher_name() -> str:
    """The process that started this one and that would start another in its place: its pid, and its time of start.
    Empty without torchrun."""
    if not started_by_torchrun():
        return ""
    launcher = _launcher or _find_launcher()
    return f"{launcher.pid} {launcher.started}".strip()


def has_ended(name: str) -> bool:
    """Whether the torchrun of this machine that `launcher_name` called `name` is known to have ended."""
    pid, _, started = name.partition(" ")
    return pid.isdigit() and started.isdigit() and Launcher(int(pid), started).has_ended()
