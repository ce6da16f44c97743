"""Processes of this machine: a name by which others can ask whether one is alive, and the launcher of a rank.

torchrun, and `ddp_train.py --processes`, end their ranks when they leave in good order. When they are killed (by the
out-of-memory killer, by a container that closes) nobody does, and nobody would see the ranks' output, restart them or
stop them: they would train on at the price of the machine, or wait for hours at a rendezvous whose store has died with
torchrun. So each rank looks after its launcher itself, in a thread, from its first line on. (Linux could send a signal,
by prctl's PR_SET_PDEATHSIG; but not if the launcher had ended before that call, nor elsewhere.)
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import EXIT, tell_soon

ENDED_STATES = "ZX"  # zombie, dead
# The pid of the ddp_train.py that has started this rank (distributed/environment.py).
PARENT = "DDP_TRAIN_PARENT"
POLL_SECONDS = 0.5
# For the step that is under way and its checkpoint; with what noticing takes, all ranks are gone 15 s after torchrun.
ENDING_SECONDS = 12.0

_launcher = 0  # the pid of the parent that this process looks after; 0: of none
_ask_to_stop: Callable[[], None] | None = None


# Names of processes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessName:
    """A process as others can know it. Pids mean something only inside `namespace`: one boot of one machine, or one
    container in it."""

    host: str
    pid: int
    namespace: str

    @classmethod
    def own(cls) -> ProcessName:
        """This process's."""
        namespace = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return cls(socket.gethostname(), os.getpid(), namespace)

    def is_neighbour_of(self, other: ProcessName) -> bool:
        """True if both processes' pids belong to the same host and namespace."""
        return (self.host, self.namespace) == (other.host, other.namespace)

    def is_gone(self) -> bool:
        """True if the process, a neighbour of this one under any user, has ended. One that has ended is gone also while
        its parent has not asked for its status yet."""
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):  # the latter: a number that no process has
            return True
        except PermissionError:  # another user's
            return False
        with suppress(OSError, IndexError):
            return _stat(self.pid)[0] in ENDED_STATES
        return False

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}"


def start_time(pid: int) -> str:
    """Start time of the process in the system's clock ticks, which distinguishes it from a later one with the same pid.
    Empty if it has ended or cannot be seen."""
    with suppress(OSError, IndexError):
        fields = _stat(pid)
        return "" if fields[0] in ENDED_STATES else fields[19]
    return ""


def _stat(pid: int) -> list[str]:
    """proc(5), stat, from field 3, the state, on: before it comes the name, which may hold anything, brackets too."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


# The launcher -----------------------------------------------------------------------------------------------------


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_launched() -> bool:
    """True in a rank that has a launcher to look after."""
    return PARENT in os.environ or started_by_torchrun()


def launcher_name() -> str:
    """The process that started this one and that would start another in its place: its pid, and its time of start.
    Empty without a launcher."""
    if not is_launched():
        return ""
    pid = _launcher or os.getppid()
    return f"{pid} {start_time(pid)}".strip()


def has_ended(name: str) -> bool:
    """True if the launcher of this machine that `launcher_name` called `name` is known to have ended."""
    pid, _, started = name.partition(" ")
    return pid.isdigit() and started.isdigit() and start_time(int(pid)) != started


def exit_when_launcher_dies() -> None:
    """Have this process end soon after its launcher, if it has one."""
    global _launcher
    if _launcher or not is_launched():
        return
    _launcher = os.getppid()
    if _is_orphan():  # the launcher was killed before this line was reached
        _leave("")
    threading.Thread(target=_look_after_launcher, daemon=True, name="launcher").start()


def is_launcher_gone() -> bool:
    """True once the launcher has ended: the system then gives its children another parent."""
    return _launcher not in (0, os.getppid())


def on_launcher_death(ask: Callable[[], None]) -> None:
    """Once the launcher has ended call `ask`, in another thread than this one, and give the process ENDING_SECONDS to
    end by itself. Without such a function it is ended at once."""
    global _ask_to_stop
    _ask_to_stop = ask


def _look_after_launcher() -> None:
    # Once more after a pause: a launcher that is being killed can have lost its children and not yet closed its store.
    time.sleep(POLL_SECONDS)
    was_orphan = _is_orphan()
    while not (was_orphan or is_launcher_gone()):
        time.sleep(POLL_SECONDS)
    if _ask_to_stop is None:
        _leave("")
    else:
        _ask_to_stop()
        time.sleep(ENDING_SECONDS)
        _leave(f" before a checkpoint was written in {ENDING_SECONDS:g} s")


def _leave(where: str) -> None:
    is_told = EXIT.is_explained or EXIT.has_own_reason
    EXIT.is_explained = True
    if os.environ.get("LOCAL_RANK", "0") == "0" and not is_told:
        name = "ddp_train.py --processes" if PARENT in os.environ else "torchrun"
        tell_soon(
            f"{name} has ended (killed?){where}, and its processes with it; run the same command again to continue"
        )
    os._exit(1)


def _is_orphan() -> bool:
    """True if the launcher had ended before its pid was read. torchrun does not pass its pid on, but the store that it
    keeps would answer. False on other machines than the store's, where nothing is known."""
    if PARENT in os.environ:
        return os.environ[PARENT] != str(os.getppid())
    if os.environ.get("GROUP_RANK") != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    try:
        # Bytes: for text Python would import a codec, and wait for an import that is under way in the main thread.
        address = os.environb[b"MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with socket.socket() as store:
            store.settimeout(ENDING_SECONDS / 2)
            store.connect(address)
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError, ValueError):  # for others to tell
        return False
    return False
