"""A Hub on the loopback interface with one bucket, for tests of mirrors at hf://buckets/.

Its clients are the real huggingface_hub and hf_xet. The latter keeps all contents in a local folder (its scheme
`local://`) in place of a server.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import hf_xet

from tests.support.http_server import Answer, http_server

BUCKET = "me/runs"
TOKEN = "hf_token-of-the-tests"


@contextmanager
def bucket_hub(folder: Path) -> Iterator[dict[str, str]]:
    """Start a Hub that keeps its contents in `folder`, and yield the environment variables with which a process uses
    it."""
    (folder / "home").mkdir(parents=True)
    storage = folder / "xet"
    files: dict[str, dict[str, Any]] = {}  # as the Hub lists them, by path
    contents: dict[str, bytes] = {}  # by their hash

    def token() -> tuple[str, int]:
        return "token-of-the-storage", int(time.time()) + 3600

    def add(path: str, xet_hash: str) -> None:
        if xet_hash not in contents:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                shutil.copytree(storage, f"{scratch}/xet")  # because the client's process has locked the database
                with hf_xet.XetSession().new_file_download_group(f"local://{scratch}/xet", *token()) as group:
                    group.start_download_file(hf_xet.XetFileInfo(xet_hash), f"{scratch}/file")
                contents[xet_hash] = Path(scratch, "file").read_bytes()
        size, now = len(contents[xet_hash]), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        files[path] = {"type": "file", "path": path, "size": size, "xetHash": xet_hash, "uploadedAt": now}

    def answer(method: str, address: str, headers: Any, given: bytes) -> Answer:
        if method == "POST":
            for line in given.splitlines():
                operation = json.loads(line)
                if operation["type"] == "addFile":
                    add(operation["path"], operation["xetHash"])
                else:
                    files.pop(operation["path"], None)
            return as_json({"failed": []})
        url = urlsplit(address)
        path = unquote(url.path)
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            return as_json({"error": "Invalid credentials"}, status=401)
        if path == f"/api/buckets/{BUCKET}":
            day = "2026-01-01T00:00:00.000Z"
            return as_json({"id": BUCKET, "private": True, "createdAt": day, "size": 0, "totalFiles": 0})
        if path.startswith(f"/api/buckets/{BUCKET}/xet-"):
            secret, ends = token()
            return as_json({"casUrl": f"local://{storage}", "accessToken": secret, "exp": ends})
        if path.startswith(tree := f"/api/buckets/{BUCKET}/tree"):
            return as_json(listed(files, path.removeprefix(tree).strip("/"), recursive="recursive=true" in url.query))
        if file := files.get(path.removeprefix(f"/buckets/{BUCKET}/resolve/")):
            data, asked = contents[file["xetHash"]], headers.get("Range", "")
            first, _, last = asked.removeprefix("bytes=").partition("-")
            return (206, data[int(first) : int(last) + 1]) if asked else (200, data)
        return *as_json({"error": "not found"}, status=404), {"X-Error-Code": "EntryNotFound"}

    with http_server(answer) as address:
        yield {"HF_ENDPOINT": address, "HF_TOKEN": TOKEN, "HF_HOME": f"{folder}/home", "HF_HUB_OFFLINE": "0"}


def as_json(body: object, *, status: int = 200) -> tuple[int, bytes]:
    return status, json.dumps(body).encode()


def listed(files: dict[str, dict[str, Any]], prefix: str, *, recursive: bool) -> list[dict[str, Any]]:
    """Return the files whose paths start with `prefix`. Without `recursive`, a folder stands for all files in it."""
    found: dict[str, dict[str, Any]] = {}
    start = len(prefix) + 1 if prefix else 0
    for path, file in sorted(files.items()):
        if path.startswith(prefix):
            name, is_below, _ = path[start:].partition("/")
            folder = path[:start] + name
            is_folder = is_below and not recursive
            found[folder if is_folder else path] = {"type": "directory", "path": folder} if is_folder else file
    return list(found.values())
