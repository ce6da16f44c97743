"""Locks on folders by flock(2). A process holds a lock until it calls `release` or ends, however it ends.

On a file system without locks, a folder counts as locked while the owner in the lock file may be alive.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.common.errors import RunError, UserError, os_errors_as
from harness.common.processes import ENDING_SECONDS, ProcessName, has_ended, launcher_name

LEAVING_SECONDS = ENDING_SECONDS + 3.0


@dataclass(frozen=True)
class Owner:
    """The content of a lock file: the process that holds the lock, or held it last."""

    process: ProcessName
    since: str  # date and time (UTC) of the record
    torchrun: str  # the owner's launcher, as `launcher_name` returns it
    began: bool  # True once the owner, or an earlier process of the same launcher, has begun to train

    @classmethod
    def read(cls, descriptor: int) -> Owner | None:
        """Return the owner recorded in an open lock file, or None if none can be read."""
        with suppress(OSError, ValueError, RecursionError):
            values = json.loads(os.pread(descriptor, 4096, 0))
            if isinstance(values, dict) and isinstance(values.get("pid"), int):
                process = ProcessName(str(values.get("host")), values["pid"], str(values.get("namespace")))
                return cls(process, str(values.get("since")), str(values.get("torchrun")), bool(values.get("began")))
        return None

    def is_here(self) -> bool:
        """Return True if this process can see whether the owner is alive."""
        return self.process.is_neighbor_of(ProcessName.own())


_held: dict[Path, int] = {}  # lock file -> its descriptor, for each lock that this process holds


@dataclass
class RunLock:
    """Lock that this process holds on a folder. `path` is the lock file in the folder."""

    path: Path
    descriptor: int
    began_before: bool  # an earlier process of the same launcher had begun to train, and this one is its restart

    @classmethod
    def take(cls, path: Path, use: str) -> RunLock:
        """Lock the file `path`, and return the lock. A missing file is created.

        `use`, such as "trained", completes the message "is being ... by another process". Waits up to LEAVING_SECONDS
        for an owner whose launcher has ended. Raises UserError if the lock is or may be held, even by this process.
        Raises RunError if the file cannot be written.
        """
        with _writing(path):  # the file stays open: the system closes it, and frees the lock, when this process ends
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        deadline = time.monotonic() + LEAVING_SECONDS
        while True:
            try:
                # The package filelock would replace only this call.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                owner, remedy = Owner.read(descriptor), ""
            except BlockingIOError:
                owner, remedy = Owner.read(descriptor), "wait for it, or stop it"
                # If the owner's launcher was killed, the owner ends soon.
                if owner and owner.is_here() and has_ended(owner.torchrun) and time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
            except OSError:  # a file system without locks: refuse if the recorded owner may be alive
                owner = Owner.read(descriptor)
                is_alive = owner is not None and not (owner.is_here() and owner.process.is_gone())
                remedy = f"if it is dead, delete {path}" if is_alive else ""
            break
        if remedy:
            who = f" ({owner.process}, since {owner.since})" if owner else ""
            raise UserError(f"{path.parent}: is being {use} by another process{who}; {remedy}")
        # This process is a restarted worker if the recorded owner had the same launcher and had begun to train.
        is_restart = bool(owner and owner.is_here() and owner.began and owner.torchrun == launcher_name() != "")
        lock = cls(path, descriptor, is_restart)
        lock._write(began=is_restart)
        _held[path] = descriptor
        return lock

    def note_begun(self) -> None:
        """Record that training has begun, so that a restarted worker can tell that there is something to resume. Raises
        RunError if the file cannot be written."""
        self._write(began=True)

    def _write(self, *, began: bool) -> None:
        owner = asdict(ProcessName.own()) | {"since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())}
        text = json.dumps(owner | {"torchrun": launcher_name(), "began": began}) + "\n"
        with _writing(self.path):
            # Write before truncating, so that the file keeps its old content if the disk is full.
            size = os.pwrite(self.descriptor, text.encode(), 0)
            os.ftruncate(self.descriptor, size)


def release(path: Path) -> None:
    """Give up the lock `path` if this process holds it."""
    if (descriptor := _held.pop(path, None)) is not None:
        os.close(descriptor)


def last_owner(path: Path) -> Owner | None:
    """Return the process that holds the lock `path` or held it last, or None if it is not known."""
    with suppress(OSError), os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        return Owner.read(file.fileno())
    return None


def is_held(path: Path) -> bool | None:
    """Return True if a living process holds the lock `path`, None if the recorded owner is of another machine, boot or
    container, otherwise False."""
    owner = last_owner(path)
    if owner is not None and not owner.is_here():
        return None
    # The test below takes the lock for a moment, in which another process that wants it is refused. So the lock is
    # tested only if a process with the owner's pid is alive.
    if owner is None or owner.process.is_gone():
        return False
    try:
        with path.open("rb") as file:  # closing it frees the lock again
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:  # removed meanwhile
        return False
    except OSError:  # another process holds the lock, or the file system has no locks
        return True
    return False  # the owner has ended, and a later process has its pid


def _writing(path: Path) -> AbstractContextManager[None]:
    remedy = "; make the folder writable, free some space, or copy the folder elsewhere"
    return os_errors_as(RunError, f"{path}: the folder cannot be locked", remedy)
