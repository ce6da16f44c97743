"""The files of a repository on the Hugging Face Hub: which there are, and whether a copy is what the Hub describes."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub

from harness.hub_errors import HubWork

# Files of the repository that are about git or the download itself, not about the dataset.
IGNORED_FILES = [".git*", ".cache/*"]
INFO_TIMEOUT_SECONDS = 30.0  # huggingface_hub waits for ever where none is given
HASH_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class HubFile:
    """One file of the repository as the Hub describes it; LFS files have a SHA-256, the others a git blob SHA-1."""

    path: str
    size: int | None
    sha256: str | None
    git_sha1: str | None


def list_files(work: HubWork, revision: str | None = None) -> tuple[str, list[HubFile]]:
    """Return a revision's commit (the newest's, by default) and its files. Raises UserError."""
    info = work.call(
        lambda: huggingface_hub.HfApi().dataset_info(
            work.name, revision=revision, files_metadata=True, timeout=INFO_TIMEOUT_SECONDS
        )
    )
    files = [
        HubFile(
            path=sibling.rfilename,
            size=sibling.lfs.size if sibling.lfs else sibling.size,
            sha256=sibling.lfs.sha256 if sibling.lfs else None,
            git_sha1=None if sibling.lfs else sibling.blob_id,
        )
        for sibling in info.siblings or []
        if not any(fnmatch.fnmatchcase(sibling.rfilename, pattern) for pattern in IGNORED_FILES)
    ]
    if info.sha is None or not files:
        raise work.failed("the repository holds no files", work.by_hand)
    for file in files:
        if not _stays_inside(file.path):
            problem = f"the repository lists {file.path!r}, which leads out of the dataset's folder"
            raise work.failed(problem, f"check HF_ENDPOINT; or {work.by_hand}")
    return info.sha, files


def _stays_inside(path: str) -> bool:
    """Whether a path from elsewhere, put below a folder, stays there: a hostile endpoint might name any file of this
    machine, to be written or, where its hash differs, deleted."""
    return "\0" not in path and all(part not in {"", ".", ".."} for part in path.split("/"))


def find_fault(path: Path, file: HubFile, advance: Callable[[int], object]) -> str | None:
    """What is wrong with a downloaded file; None if nothing is. `advance` is told of the bytes that have been read."""
    size = size_of(path)
    if size is None:
        return "expected a file, found none"
    if file.size is not None and size != file.size:
        return f"expected {file.size} bytes, found {size}"
    if file.sha256 is not None:
        return _hash_fault(path, hashlib.sha256(), file.sha256, advance)
    if file.git_sha1 is not None:
        # https://git-scm.com/book/en/v2/Git-Internals-Git-Objects: a blob's name covers its type and length too.
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        return _hash_fault(path, digest, file.git_sha1, advance)
    return None


def _hash_fault(path: Path, digest: hashlib._Hash, expected: str, advance: Callable[[int], object]) -> str | None:
    with path.open("rb") as stream:
        while chunk := stream.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    found = digest.hexdigest()
    kind = digest.name.upper().replace("SHA", "SHA-")
    return None if found == expected else f"expected {kind} {expected}, found {found}"


def size_of(path: Path) -> int | None:
    """None where there is no file."""
    return path.stat().st_size if path.is_file() else None
