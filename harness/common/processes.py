"""Processes of this machine: whether one is alive, and which one a name means that was written down by another."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ENDED_STATES = "ZX"  # zombie, dead


def is_alive(pid: int) -> bool:
    """True if a process with this pid runs, under any user. A process that has ended is not alive, even if its parent
    has not asked for its status yet."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the latter: a number that no process has
        return False
    except PermissionError:  # another user's
        return True
    with suppress(OSError, IndexError):
        return _stat(pid)[0] not in ENDED_STATES
    return True


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
        """True if the process, a neighbour of this one, has ended."""
        return not is_alive(self.pid)

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}"
