"""Locks on folders, which a killed process leaves behind free to be taken.

flock(2) decides. The file also says who holds the lock: for the refusal, for file systems without locks, and for a
restarted worker. (The package filelock would replace one call here, and empties the file in its older versions.)
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.common.errors import RunError, UserError
from harness.common.processes import ENDING_SECONDS, ProcessName, has_ended, launcher_name

LEAVING_SECONDS = ENDING_SECONDS + 3.0


@dataclass(frozen=True)
class Owner:
    """The content of a lock file: the process that holds the lock, or held it last."""

    process: ProcessName
    since: str
    torchrun: str  # `launcher_name` of its launcher
    began: bool  # it, or an earlier process of the same launcher, had begun to train

    @classmethod
    def read(cls, descriptor: int) -> Owner | None:
        """None for a file of anything else."""
        with suppress(OSError, ValueError, RecursionError):
            values = json.loads(os.pread(descriptor, 4096, 0))
            if isinstance(values, dict) and isinstance(values.get("pid"), int):
                process = ProcessName(str(values.get("host")), values["pid"], str(values.get("namespace")))
                return cls(process, str(values.get("since")), str(values.get("torchrun")), bool(values.get("began")))
        return None

    def is_here(self) -> bool:
        """True if this process can see whether the owner is alive."""
        return self.process.is_neighbour_of(ProcessName.own())

    def is_leaving(self) -> bool:
        """True if the owner's launcher, on this machine, has ended, so that the owner ends soon."""
        return self.is_here() and has_ended(self.torchrun)

    def had_begun_here(self) -> bool:
        """True if the owner was started by this process's own launcher, and had begun: this is a restarted worker."""
        return self.is_here() and self.began and self.torchrun == launcher_name() != ""


@dataclass
class RunLock:
    """A file in the folder that this process holds until it ends."""

    path: Path
    descriptor: int
    began_before: bool  # an earlier process of the same torchrun had already begun: it restarts its workers

    @classmethod
    def take(cls, path: Path, use: str) -> RunLock:
        """Take the lock. `use` says in the refusal what is done with the folder: "trained" of a run, "made" of data.

        Waits for an owner whose launcher has been killed. Raises UserError naming an owner that lives, and RunError if
        the file cannot be written.
        """
        try:  # kept open: the system closes it when the process ends
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise _not_written(path, error) from None
        deadline = time.monotonic() + LEAVING_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                owner = Owner.read(descriptor)
                if not (owner and owner.is_leaving()) or time.monotonic() > deadline:
                    raise _refusal(path, use, owner, "wait for it, or stop it") from None
                time.sleep(0.1)
            except OSError:  # a file system without locks: believe an owner that may be alive
                owner = Owner.read(descriptor)
                if owner and not (owner.is_here() and owner.process.is_gone()):
                    raise _refusal(path, use, owner, f"if it is dead, delete {path}") from None
                break
        owner = Owner.read(descriptor)
        lock = cls(path, descriptor, began_before=owner is not None and owner.had_begun_here())
        lock._write(began=lock.began_before)
        return lock

    def note_begun(self) -> None:
        """Record that a restarted worker has something to resume from now on."""
        self._write(began=True)

    def _write(self, *, began: bool) -> None:
        owner = asdict(ProcessName.own()) | {"since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())}
        text = json.dumps(owner | {"torchrun": launcher_name(), "began": began}) + "\n"
        try:
            # In this order, so that on a full disk the file keeps what it says.
            size = os.pwrite(self.descriptor, text.encode(), 0)
            os.ftruncate(self.descriptor, size)
        except OSError as error:
            raise _not_written(self.path, error) from None


def is_held(path: Path) -> bool | None:
    """True if a living process holds the lock `path`; None if its owner is on another machine or in another container,
    whose processes cannot be seen from here.

    The lock itself is tried only where a process with the owner's pid is alive, so that nobody is refused meanwhile.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        owner = Owner.read(descriptor)
        if owner is None:
            return False
        if not owner.is_here():
            return None
        if owner.process.is_gone():
            return False
        with suppress(OSError):  # held by another, or a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False  # the process with the owner's pid is a later one; closing the file gives the lock back
        return True
    finally:
        os.close(descriptor)


def _refusal(path: Path, use: str, owner: Owner | None, remedy: str) -> UserError:
    who = f" ({owner.process}, since {owner.since})" if owner else ""
    return UserError(f"{path.parent}: is being {use} by another process{who}; {remedy}")


def _not_written(path: Path, error: OSError) -> RunError:
    return RunError(f"{path}: cannot be written, and so cannot keep others out of its folder: {error.strerror}")
