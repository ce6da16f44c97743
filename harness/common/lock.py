"""Who may work on a folder: locks that a killed process leaves behind for the taking."""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.common.errors import RunError, UserError
from harness.common.launcher import ENDING_SECONDS, has_ended, launcher_name
from harness.common.processes import ProcessName

LEAVING_SECONDS = ENDING_SECONDS + 3.0


@dataclass
class RunLock:
    """A file in the folder that this process holds until it ends, and that names it to others."""

    path: Path
    descriptor: int
    began_before: bool  # an earlier process of the same torchrun had already begun: it restarts its workers

    @classmethod
    def take(cls, path: Path, use: str) -> RunLock:
        """Take the lock, also from an owner that is dead. `use` is what becomes of the folder meanwhile, for another
        process to be told: "trained" of a run, "made" of a dataset.

        Raises UserError naming an owner that lives, and RunError if the file cannot be written.
        """
        try:  # kept open: the system closes it when the process ends
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise _not_written(path, error) from None
        try:
            _flock(descriptor)
        except BlockingIOError:
            raise _refusal(path, use, _read(descriptor), "wait for it, or stop it") from None
        except OSError:  # a file system without locks: what is written in the file has to do
            owner = _read(descriptor)
            if _may_live(owner):
                raise _refusal(path, use, owner, f"if it is dead, delete {path}") from None
        lock = cls(path, descriptor, began_before=_same_torchrun(_read(descriptor)))
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
    whose processes cannot be seen from here. Does not block a process that takes the lock meanwhile: the lock itself is
    tried only where a process with the owner's pid is alive."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        owner = _read(descriptor)
        if not owner:
            return False
        if not _name(owner).is_neighbour_of(ProcessName.own()):
            return None
        return not _name(owner).is_gone() and not _is_free(descriptor)
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """True if no process holds the lock: then the living process with the owner's pid is a later one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # kept by another, or a file system without locks
        return False
    return True  # closing the file gives it back


def _flock(descriptor: int) -> None:
    """Raises BlockingIOError if another process keeps the lock; one whose torchrun has been killed soon gives it up."""
    deadline = time.monotonic() + LEAVING_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not _is_leaving(_read(descriptor)) or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _is_leaving(owner: dict[str, Any]) -> bool:
    """True if the owner is on this machine and its launcher has ended, so that it ends too."""
    same_machine = bool(owner) and _name(owner).is_neighbour_of(ProcessName.own())
    return same_machine and has_ended(str(owner.get("torchrun")))


def _read(descriptor: int) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        owner = json.loads(os.pread(descriptor, 4096, 0))
        if isinstance(owner, dict) and isinstance(owner.get("pid"), int):
            return owner
    return {}


def _name(owner: dict[str, Any]) -> ProcessName:
    return ProcessName(str(owner.get("host")), int(owner.get("pid", 0)), str(owner.get("namespace")))


def _may_live(owner: dict[str, Any]) -> bool:
    name = _name(owner)
    return bool(owner) and not (name.is_neighbour_of(ProcessName.own()) and name.is_gone())


def _refusal(path: Path, use: str, owner: dict[str, Any], remedy: str) -> UserError:
    who = f" ({_name(owner)}, since {owner.get('since')})" if owner else ""
    return UserError(f"{path.parent}: is being {use} by another process{who}; {remedy}")


def _not_written(path: Path, error: OSError) -> RunError:
    return RunError(f"{path}: cannot be written, and so cannot keep others out of its folder: {error.strerror}")


def _same_torchrun(owner: dict[str, Any]) -> bool:
    same_machine = bool(owner) and _name(owner).is_neighbour_of(ProcessName.own())
    return same_machine and owner.get("torchrun") == launcher_name() != "" and bool(owner.get("began"))
