"""Processes of this machine: names by which a process can check if another one is alive, and the launcher of a rank.

Nobody ends the ranks of a killed launcher. So each rank calls `exit_when_launcher_dies` before anything else.
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

ENDED_STATES = (["Z"], ["X"])  # zombie, dead
# Environment variable with the pid of the process that has started this rank for --processes
# (distributed/environment.py).
PARENT = "DDP_TRAIN_PARENT"
POLL_SECONDS = 0.5
# Time that a rank has for its current step and a checkpoint after it has noticed the launcher's end. Including the time
# to notice the end, all ranks have exited at most 15 s after torchrun.
ENDING_SECONDS = 12.0

_launcher = 0  # pid of the parent process that this process watches; 0 for none
_ask_to_stop: Callable[[], None] | None = None


# Names of processes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessName:
    """Name by which other processes can refer to a process. A pid is meaningful only within `namespace`: one boot of
    one machine, or one container on it."""

    host: str
    pid: int
    namespace: str

    @classmethod
    def own(cls) -> ProcessName:
        """Return the ProcessName of the calling process."""
        namespace = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return cls(socket.gethostname(), os.getpid(), namespace)

    def is_neighbor_of(self, other: ProcessName) -> bool:
        """Return True if both processes' pids belong to the same host and namespace."""
        return (self.host, self.namespace) == (other.host, other.namespace)

    def is_gone(self) -> bool:
        """Return True if the process has ended or, on Linux, is a zombie. The process must have the same host and
        namespace as the calling process."""
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):  # OverflowError: a number that is too large for a pid
            return True
        except PermissionError:  # it is alive and belongs to another user
            return False
        return _stat(self.pid)[:1] in ENDED_STATES

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}"


def start_time(pid: int) -> str:
    """Return the process's start time in clock ticks since the system's start, as text.

    Returns "" if the process has ended or cannot be seen. A later process with the same pid has another start time.
    """
    fields = _stat(pid)
    return "" if not fields or fields[:1] in ENDED_STATES else fields[19]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat (proc(5)) from the third (the state) on, or an empty list if the file cannot
    be read."""
    with suppress(OSError):
        # The name in the second field can hold any characters, even parentheses.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def end_with_parent() -> None:
    """Start a thread that ends this process, a child started by multiprocessing, when its parent ends."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    assert parent is not None

    # Without this thread, the child would wait forever, because the processes of a pool keep each other's pipes open.
    def wait_for_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()


# The launcher -----------------------------------------------------------------------------------------------------
#
# If a launcher (torchrun, or a command with --processes) is killed, nobody ends its ranks. They would keep training,
# while the machine costs money, or wait for hours at a rendezvous whose store ended with torchrun. So each rank watches
# its launcher itself. (Linux's PR_SET_PDEATHSIG sends no signal if the launcher has ended before that call, and macOS
# has nothing like it.)


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_launched() -> bool:
    """Return True if torchrun or the option --processes of a command started this process."""
    return PARENT in os.environ or started_by_torchrun()


def launcher_name() -> str:
    """Return the launcher's pid and start time, separated by a space, or only the pid if the start time cannot be read.
    Returns "" if there is no launcher."""
    if not is_launched():
        return ""
    pid = _launcher or os.getppid()
    return f"{pid} {start_time(pid)}".strip()


def has_ended(name: str) -> bool:
    """Return True if the launcher `name` (from `launcher_name`) of this machine is known to have ended."""
    pid, _, started = name.partition(" ")
    return pid.isdecimal() and started.isdecimal() and start_time(int(pid)) != started


def exit_when_launcher_dies() -> None:
    """Start a thread that ends this process soon after its launcher has ended. Does nothing without a launcher."""
    global _launcher
    if _launcher or not is_launched():
        return
    _launcher = os.getppid()
    if _is_orphan():  # the launcher was killed before this line was reached
        _leave("")
    threading.Thread(target=_look_after_launcher, daemon=True, name="launcher").start()


def is_launcher_gone() -> bool:
    """Return True once the launcher that `exit_when_launcher_dies` watches has ended: this process then has another
    parent."""
    return _launcher not in (0, os.getppid())


def on_launcher_death(ask: Callable[[], None]) -> None:
    """Register `ask`, a function that asks this process to stop. A thread calls it once the launcher has ended. The
    process then has ENDING_SECONDS to exit by itself."""
    global _ask_to_stop
    _ask_to_stop = ask


def _look_after_launcher() -> None:
    # Check a second time after a pause, because the store of a launcher that is being killed can still answer when its
    # children already have another parent.
    time.sleep(POLL_SECONDS)
    if not _is_orphan():
        while not is_launcher_gone():
            time.sleep(POLL_SECONDS)
    if _ask_to_stop is None:
        _leave("")
    else:
        _ask_to_stop()
        time.sleep(ENDING_SECONDS)
        _leave(f" after {ENDING_SECONDS:g} s, perhaps without a new checkpoint")


def _leave(remark: str) -> None:
    is_printed = EXIT.is_explained or EXIT.has_own_reason
    EXIT.is_explained = True
    if os.environ.get("LOCAL_RANK", "0") == "0" and not is_printed:
        name = "the process that started all ranks (--processes)" if PARENT in os.environ else "torchrun"
        tell_soon(f"{name} has ended (killed?), and its processes with it{remark}; {EXIT.again} to continue")
    os._exit(1)


def _is_orphan() -> bool:
    """Return True if the launcher is known to have ended, perhaps before this process read the launcher's pid."""
    # A command with --processes passes its pid to its ranks. torchrun does not, but its store refuses connections once
    # torchrun has ended.
    if PARENT in os.environ:
        return os.environ[PARENT] != str(os.getppid())
    if os.environ.get("GROUP_RANK") == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            # The address is bytes because Python would import a codec for a str, and wait for the main thread's
            # imports.
            address = os.environb[b"MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            with socket.socket() as store:
                store.settimeout(ENDING_SECONDS / 2)
                store.connect(address)
        except ConnectionRefusedError:
            return True
        except (OSError, KeyError, ValueError):  # reported elsewhere
            pass
    return False
