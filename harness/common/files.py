"""Hashing, flushing, atomic writing and moving of files and folders, so that no file or folder is ever incomplete under
its final name."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import shutil
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from harness.common.errors import RunError, UserError, os_errors_as
from harness.common.processes import ProcessName

LONGEST_NAME = 200  # file systems allow 255 bytes, and the names of drafts are longer than the final ones
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
FULL_DISK = {errno.ENOSPC, errno.EDQUOT}  # the errors of a full disk, and of a used-up quota
REMEDY = "; create the folder, make it writable, or free some space"


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's contents as a hexadecimal string."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def version_of(status: os.stat_result) -> str:
    """Return a file's size and modification time (ns) as text. While this text stays the same, the file is taken to be
    unchanged."""
    return f"{status.st_size} bytes, {status.st_mtime_ns}"


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Path) -> None:
    """Raise UserError if no file can be created in `folder`."""
    if folder.is_symlink() and not folder.exists():
        target = os.readlink(folder)
        raise UserError(f"{folder}: a link to {target}, which does not exist; mount its disk, or move the link away")
    with os_errors_as(UserError, f"{folder}: no file can be written there", REMEDY), tempfile.TemporaryFile(dir=folder):
        pass


def refuse_special(path: Path) -> None:
    """Raise UserError if `path` is a pipe, a device or a socket, because reading it could wait or go on forever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: not a regular file; move it away, or give another path")


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, without a byte order mark. Raises UserError if the file cannot be read.

    Pipes and devices are refused, except a pipe in /dev or /proc, like a shell's <(command).
    """
    try:
        if not (path.is_fifo() and path.absolute().parts[1] in {"dev", "proc"}):  # zsh: /proc/self/fd/11
            refuse_special(path)
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        fault = "no such file"
    except OSError as error:
        fault = str(error.strerror)
    except UnicodeDecodeError as error:
        fault = f"not UTF-8 text (byte {error.start}); convert it to UTF-8"
    raise UserError(f"{path}: {fault}")


def replace_text(path: Path, text: str) -> None:
    """Replace a file's contents in one rename, so that a reader sees the old or the new contents, never a part."""
    with atomic_file(path.resolve()) as draft:  # replaces the target of a symbolic link, not the link
        draft.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(final: Path, draft: Path | None = None) -> Iterator[Path]:
    """Yield the path of a draft file for the body to write, then flush the draft to disk and rename it to `final`.

    `draft` must be on the file system of `final`. By default, it is a hidden file beside `final`. If the body fails,
    the draft is removed. A symbolic link `final` is replaced, not its target. Raises OSError if `final` is a folder or
    a special file.
    """
    if final.exists() and not final.is_file() and not final.is_dir():  # a rename would replace a device like /dev/null
        raise OSError(errno.EINVAL, "not a regular file", str(final))
    draft = draft or final.with_name(f".{final.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # a symbolic link of this name would redirect the write to another file
    try:
        yield draft
        sync(draft)
        if final.is_file() and not final.is_symlink():
            with suppress(OSError):  # some file systems have no permissions
                draft.chmod(final.stat().st_mode & 0o777)
        draft.replace(final)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yield a draft folder for the body to fill, then flush the draft to disk and rename it to `final`.

    If the body fails, the draft is removed. Raises OSError if `final` exists and is not an empty folder.
    """
    final = final.absolute()
    final.parent.mkdir(parents=True, exist_ok=True)
    with draft_folder(free_draft_path(final)) as draft:
        yield draft
        rename_whole(draft, lambda: final)


def free_draft_path(final: Path) -> Path:
    """Return the path for this process's draft of the folder `final`, in the same parent folder. Removes drafts of
    `final` that were left by killed processes of this host."""
    own, prefix = ProcessName.own(), draft_prefix(final)
    for path in final.parent.glob(f"{glob.escape(prefix)}*"):
        pid = path.name.removeprefix(prefix)  # an earlier process may have had this process's pid
        if pid.isdecimal() and (int(pid) == own.pid or replace(own, pid=int(pid)).is_gone()):
            shutil.rmtree(path, ignore_errors=True)
    return final.with_name(f"{prefix}{own.pid}")


def draft_prefix(final: Path) -> str:
    """Return the prefix of the names of this host's drafts of the folder `final`. In a name, the pid of the writing
    process follows the prefix."""
    return f".{final.name}.partial-{zlib.crc32(socket.gethostname().encode()):08x}-"


@contextmanager
def draft_folder(draft: Path) -> Iterator[Path]:
    """Create the folder `draft` and yield it. Remove it with its contents if the body fails. The body must end with a
    call of `rename_whole`."""
    draft.mkdir()
    try:
        yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def rename_whole(draft: Path, choose_name: Callable[[], Path]) -> Path:
    """Flush all files of the folder `draft` to disk, rename the folder to the path that `choose_name()` then returns
    (in the same parent folder), and return this path."""
    for path in [*draft.rglob("*"), draft]:
        sync(path)
    final = draft.rename(choose_name())
    sync(final.parent)
    return final


def move(path: Path, target: Path) -> None:
    """Move a file, link or folder to `target`, which may be on another disk. Raises RunError if the move fails; then at
    least one of `path` and `target` is complete."""
    # Copy and delete under hidden names, so that neither `path` nor `target` is ever incomplete.
    draft, doomed = (place.with_name(f".{place.name}.{os.getpid()}") for place in (target, path))
    try:
        try:
            path.rename(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, draft, symlinks=True)
            else:
                shutil.copy2(path, draft, follow_symlinks=False)
            draft.rename(target)
            path.rename(doomed)
            _remove(doomed)
    except OSError as error:  # shutil.Error, from copying a folder, lists an error for each file
        with suppress(OSError):  # such as on a read-only disk
            _remove(draft)
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise RunError(f"{path}: cannot be moved to {target}: {reason}") from None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def user_cache() -> Path:
    """Return this user's folder for files that this program can make again. It may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp-pretrain"


def check_name(name: str, what: str) -> str:
    """Return `name` if it matches SAFE_NAME and is not too long. Otherwise raises UserError with a message that begins
    with `what`."""
    if len(name) > LONGEST_NAME:
        raise UserError(f"{what} {name[:20]!r}…: longer than {LONGEST_NAME} characters; shorten it")
    if not SAFE_NAME.fullmatch(name):
        raise UserError(
            f"{what} {name!r}: must be a plain name of ASCII letters, digits and _.+- that does not begin with . + or -"
        )
    return name


def check_inside(path: Path, folder: Path, option: str) -> None:
    """Raise UserError if `path`, with symbolic links resolved, is not inside `folder`. `option` is the name of the
    command's option or argument that sets `folder`."""
    real = os.path.realpath(path)
    if not real.startswith(os.path.join(os.path.realpath(folder), "")):
        remedy = f"give the {option} that contains {real}, or move it into {folder}"
        raise UserError(f"{path}: leads out of {folder}; {remedy}")
