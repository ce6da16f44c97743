"""Small file operations that must not lose anything: flush, hash, replace."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

HASH_CHUNK_BYTES = 2**22


def sha256(path: Path) -> str:
    """Hex digest of a file's contents."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's entries, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def umask() -> int:
    """The process's umask, which can only be read by setting it."""
    current = os.umask(0)
    os.umask(current)
    return current
