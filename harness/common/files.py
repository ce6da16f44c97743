"""Small file operations that must not lose anything: flush, hash, replace, move."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from harness.common.errors import RunError, UserError

HASH_CHUNK_BYTES = 2**22


def sha256(path: Path) -> str:
    """Hex digest of a file's contents."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def version_of(status: os.stat_result) -> str:
    """What another content of a file shows in, without reading it."""
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
    path = path.resolve()  # a link stays one
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # whatever it is: a link there would lead the text elsewhere
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


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


LONGEST_NAME = 200  # file systems take 255 bytes, and drafts add to a name
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


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


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder that takes the place of `folder` in one rename when all is written and on the disk.

    Raises UserError if `folder` has something in it, RunError if the disk refuses.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(f"{folder}: exists; give another place, or move it away")
    draft = folder.absolute().with_name(f".{folder.absolute().name}.partial-{os.getpid()}")
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        try:
            yield draft
            for path in [*draft.rglob("*"), draft]:
                sync(path)
            draft.rename(folder)
            sync(draft.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors wraps a full disk in an exception of its own
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{folder}: cannot be written: {reason}") from None
