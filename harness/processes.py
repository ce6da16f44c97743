"""Processes by name: which machine one is on, and whether it still runs."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessName:
    """A process as others can know it. Pids mean something only inside `namespace`: one boot of one machine, or one
    container in it."""

    host: str
    pid: int
    namespace: str

    @classmethod
    def own(cls) -> ProcessName:
        namespace = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return cls(socket.gethostname(), os.getpid(), namespace)

    def is_neighbour_of(self, other: ProcessName) -> bool:
        """Whether the pids of both mean the same."""
        return (self.host, self.namespace) == (other.host, other.namespace)

    def is_gone(self) -> bool:
        """Whether the process, a neighbour of this one, has ended (also if its parent has not noticed yet)."""
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            return False
        with suppress(OSError):
            # pid (name) state …; the name may hold anything, brackets too.
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return False

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}"
