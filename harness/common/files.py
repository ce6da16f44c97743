"""Files and folders that must not be lost: they are flushed and hashed, appear whole under their names, and move whole.

`atomic_file` and `atomic_folder` are the ways for a new one to appear; what others must not read half, they write.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from harness.common.errors import RunError, UserError
from harness.common.processes import ProcessName

HASH_CHUNK_BYTES = 2**22
LONGEST_NAME = 200  # file systems take 255 bytes, and drafts add to a name
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


def sha256(path: Path) -> str:
    """Hex digest of a file's contents."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def version_of(status: os.stat_result) -> str:
    """A file's size and modification time (ns) as text: changed contents show in it, without reading the file."""
    return f"{status.st_size} bytes, {status.st_mtime_ns}"


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's entries, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Path) -> None:
    """Raises UserError if no file can be made in this folder: before long work whose result would go there."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{folder}: no file can be written there: {error.strerror}") from None


def replace_text(path: Path, text: str) -> None:
    """Give a file new contents in one rename: a reader sees the old ones or the new ones, never a part."""
    with atomic_file(path.resolve()) as draft:  # a link stays one
        draft.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(final: Path, draft: Path | None = None) -> Iterator[Path]:
    """The path of a hidden file beside `final`, to be written in the body: at its end, all of it being on the disk, it
    takes the place of `final` in one rename. If the body fails, it is removed, and `final` is as it was.

    `draft` is that path; by default its name has this process's number, so that processes do not meet there.
    """
    draft = draft or final.with_name(f".{final.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # whatever it is: a link there would lead the contents elsewhere
    try:
        yield draft
        sync(draft)
        draft.replace(final)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A hidden folder beside `final`, to be filled in the body: at its end, all of it being on the disk, it gets the
    name `final` in one rename. If the body fails, it is removed. What killed processes left of theirs is, too.

    Raises OSError, and leaves `final` as it was, if that is there and anything but an empty folder.
    """
    final = final.absolute()
    final.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{final.name}.partial-"
    _remove_abandoned(final.parent, prefix)
    with draft_folder(final.with_name(f"{prefix}{os.getpid()}")) as draft:
        yield draft
        rename_whole(draft, lambda: final)


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove the drafts in `folder` whose processes are gone, or had this process's number before it."""
    own = ProcessName.own()
    for path in folder.glob(f"{glob.escape(prefix)}*"):
        pid = path.name.removeprefix(prefix)
        if pid.isdecimal() and (int(pid) == own.pid or replace(own, pid=int(pid)).is_gone()):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def draft_folder(draft: Path) -> Iterator[Path]:
    """A new folder that is removed with all that is in it if the body fails; `rename_whole` ends a body that does
    not."""
    draft.mkdir()
    try:
        yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def rename_whole(draft: Path, choose_name: Callable[[], Path]) -> Path:
    """Have the disk take all that is in a folder, and then give it another name beside its own, chosen only then: the
    new path. What bears that name is whole, also after a power cut."""
    for path in [*draft.rglob("*"), draft]:
        sync(path)
    final = draft.rename(choose_name())
    sync(final.parent)
    return final


def move(path: Path, target: Path) -> None:
    """Give a file, link or folder another place, also on another disk. Raises RunError; `path` is then still whole."""
    # What bears a name is whole, the copy and the original.
    draft, doomed = (place.with_name(f".{place.name}.{os.getpid()}") for place in (target, path))
    try:
        try:
            path.rename(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copy(path, draft)
            draft.rename(target)
            path.rename(doomed)
            _remove(doomed)
    except OSError as error:  # of a folder's copy it holds one for each file
        _remove(draft)
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise RunError(f"{path}: cannot be moved to {target}: {reason}") from None


def _copy(path: Path, target: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, target, symlinks=True)
    else:
        shutil.copy2(path, target, follow_symlinks=False)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def umask() -> int:
    """The process's umask, which can only be read by setting it."""
    current = os.umask(0)
    os.umask(current)
    return current


def check_name(name: str, what: str) -> str:
    """Return `name` if it is one plain path component. Raises UserError for `..`, a slash or a hidden name."""
    if len(name) > LONGEST_NAME:
        raise UserError(f"{what} {name[:20]!r}…: longer than {LONGEST_NAME} characters")
    if not SAFE_NAME.fullmatch(name):
        raise UserError(f"{what} {name!r}: must be a plain name: letters, digits and _ . + -, no slash, no leading dot")
    return name


def check_inside(path: Path, folder: Path, option: str) -> None:
    """Raises UserError if `path`, links followed, is not inside `folder`, which is given as `option`."""
    real = os.path.realpath(path)
    if not real.startswith(os.path.join(os.path.realpath(folder), "")):
        raise UserError(f"{path}: leads out of {folder}, to {real}; name its real place by {option}, or move it")
