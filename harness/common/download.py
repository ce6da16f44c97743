"""Download a file from the web once, into this user's cache."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from harness.common.errors import UserError
from harness.common.files import atomic_file

TIMEOUT_SECONDS = 30.0
LARGEST_BYTES = 2**30
CHUNK_BYTES = 2**20


def local_copy(file_or_url: str, check: Callable[[Path], object]) -> Path:
    """Return the path of a local file unchanged. For an http(s) URL, return the path of the file's copy in this user's
    cache, and download the file first if the cache does not have it.

    Raises UserError if the download fails, or if `check(path)` raises UserError for the downloaded file (because it is
    a login page, for example). An incomplete or refused download is never left in the cache.
    """
    address = urlsplit(file_or_url)
    if address.scheme not in {"http", "https"}:
        return Path(file_or_url)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp-pretrain"
    name = PurePosixPath(address.path).name or "file"
    path = folder / f"{hashlib.sha256(file_or_url.encode()).hexdigest()[:16]}-{name}"
    if path.is_file():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as draft:
            _fetch(file_or_url, draft)
            try:
                check(draft)
            except UserError as error:
                raise UserError(str(error).replace(str(draft), file_or_url)) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise UserError(f"{file_or_url}: cannot be downloaded to {folder}: {reason}; give a file by --data") from None
    return path


def _fetch(url: str, file: Path) -> None:
    """Download `url` into `file`. Raises OSError also if the body is larger than LARGEST_BYTES, or if its length
    differs from the Content-Length that the server announced."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer, file.open("wb") as stream:
        expected, taken = answer.headers.get("Content-Length"), 0
        while chunk := answer.read(CHUNK_BYTES):
            taken += len(chunk)
            if taken > LARGEST_BYTES:
                raise OSError(f"more than {LARGEST_BYTES:,} bytes")
            stream.write(chunk)
        if expected is not None and taken != int(expected):  # urllib does not notice a broken connection
            raise OSError(f"ended after {taken:,} of {int(expected):,} bytes")
