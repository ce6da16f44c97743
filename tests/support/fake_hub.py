"""A local Hugging Face Hub for datasets and models, with as much as huggingface_hub needs. It misbehaves on request.

    with FakeHub() as hub:
        dataset = hub.add_dataset("owner/name", {"meta.json": b"{}", "train.safetensors": data})
        dataset.files["train.safetensors"].corrupt = True
        subprocess.run(command, env={**os.environ, **hub.environment(home)})

As on the real Hub, a repository's commit and the hashes of its files are computed from the contents, LFS files are
redirected to another origin that must not see the token, and the header X-Error-Code names the kind of an error. Xet is
left out, so that clients use plain HTTP.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock
from urllib.parse import unquote, urlsplit

import numpy as np
from safetensors.numpy import save

LFS_SUFFIXES = {".safetensors", ".parquet", ".bin"}
ERROR_CODES = {401: "RepoNotFound", 404: "RepoNotFound", 403: "GatedRepo"}
CORPUS = "someone/corpus"  # the name of a dataset for tests that train on one of the Hub


def corpus() -> dict[str, bytes]:
    """Return the files of a dataset on which the small runs of tests/support/launch.py can train."""
    steps = np.random.default_rng(0).integers(0, 4, 4000)
    tokens = (np.cumsum(steps) % 64).astype(np.uint16)
    meta = {"description": "x", "token_dtype": "uint16", "files": {"train": "train.safetensors"}}
    return {
        "train.safetensors": save({"tokens": tokens}),
        "validation.safetensors": save({"tokens": tokens[:500]}),
        "meta.json": json.dumps(meta).encode(),
    }


@contextmanager
def hub_here(environment: dict[str, str]) -> Iterator[None]:
    """Let huggingface_hub, which reads its environment only when it is imported, follow `environment` in the test's own
    process."""
    endpoint = environment["HF_ENDPOINT"]
    settings: dict[str, Any] = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": environment.get("HF_HUB_CACHE", f"{environment['HF_HOME']}/hub"),
        "HF_HUB_OFFLINE": environment.get("HF_HUB_OFFLINE") == "1",
        "HF_HUB_DISABLE_XET": True,
    }
    with mock.patch.multiple("huggingface_hub.constants", **settings), mock.patch.dict(os.environ, environment):
        yield


@dataclass
class FakeFile:
    """True content of a file, and faults of its downloads.

    `corrupt` flips the last byte. `truncate_at` closes the connection before this byte; with `reset`, by a TCP reset.
    `delay_seconds` is a pause between headers and body. `resolve_status` is an error that is sent instead of the file.
    The faults apply to the first `faulty_downloads` downloads.
    """

    content: bytes
    lfs: bool = False
    corrupt: bool = False
    truncate_at: int | None = None
    reset: bool = False
    delay_seconds: float = 0.0
    resolve_status: int | None = None
    faulty_downloads: float = float("inf")
    downloads: int = 0

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def blob_id(self) -> str:
        """Return the name of the git object. For an LFS file this is the name of its pointer, as on the Hub."""
        stored = self.content
        if self.lfs:
            version = "version https://git-lfs.github.com/spec/v1"
            stored = f"{version}\noid sha256:{self.sha256}\nsize {len(self.content)}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.blob_id


@dataclass
class FakeDataset:
    """Repository of a dataset or a model.

    `status` is the HTTP status of an error that answers every request, or None. With `named_errors`, the error has a
    code that names its reason. Files of a `gated` repository can be listed but not read.
    """

    files: dict[str, FakeFile]
    status: int | None = None
    named_errors: bool = True
    gated: bool = False
    private: bool = False

    @property
    def commit(self) -> str:
        listing = "".join(f"{path} {file.blob_id}\n" for path, file in sorted(self.files.items()))
        return hashlib.sha1(listing.encode()).hexdigest()


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    authorization: str | None
    range: str | None


@dataclass
class FakeHub:
    """Two servers with a common state: the Hub itself, and the storage to which LFS files are redirected."""

    datasets: dict[str, FakeDataset] = field(default_factory=dict)
    models: dict[str, FakeDataset] = field(default_factory=dict)
    requests: list[Seen] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)  # LFS objects that were uploaded, by their SHA-256
    upload_status: int | None = None  # the error with which every commit is answered

    def __post_init__(self) -> None:
        self.released = threading.Event()  # ends all delays, present and future
        self._servers = [_Server(self) for _ in range(2)]

    def __enter__(self) -> FakeHub:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        return self._servers[0].url

    @property
    def storage_url(self) -> str:
        return self._servers[1].url

    def environment(self, home: Path) -> dict[str, str]:
        """Return variables that make a subprocess use this Hub, and none of the user's own Hugging Face settings."""
        kept_off = {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **kept_off}

    def repositories(self, kind: str | None) -> dict[str, FakeDataset]:
        """Return the datasets if `kind` is "dataset" or "datasets", else the models. In addresses of the Hub, models
        have no kind (None)."""
        return self.datasets if kind in ("datasets", "dataset") else self.models

    def add_dataset(self, name: str, contents: dict[str, bytes]) -> FakeDataset:
        """Add a repository; which files are LFS follows from their suffix."""
        files = {
            path: FakeFile(content, lfs=PurePosixPath(path).suffix in LFS_SUFFIXES)
            for path, content in contents.items()
        }
        self.datasets[name] = FakeDataset(files)
        return self.datasets[name]

    def seen(self, method: str, part: str) -> list[Seen]:
        """Return the requests with this method whose path contains `part`, in order."""
        return [request for request in self.requests if request.method == method and part in request.path]


class _Server(ThreadingHTTPServer):
    def __init__(self, hub: FakeHub) -> None:
        self.hub = hub
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing, because these tests kill clients in the middle of requests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing. Tests look at `requests` instead."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        seen = Seen(self.command, path, self.headers.get("Authorization"), self.headers.get("Range"))
        self.server.hub.requests.append(seen)
        for pattern, answer in ROUTES:
            if match := pattern.fullmatch(path):
                if (dataset := self._open(match)) is not None:
                    answer(self, dataset, match)
                return
        self._refuse(404, None)

    def _open(self, match: re.Match[str]) -> FakeDataset | None:
        """Return the repository of a request. If it cannot be read, send the error and return None."""
        revision = match["revision"]
        dataset = self.server.hub.repositories(match["kind"]).get(match["name"])
        if dataset is None:
            self._refuse(404, "RepoNotFound")
        elif dataset.status is not None:
            self._refuse(dataset.status, ERROR_CODES.get(dataset.status) if dataset.named_errors else None)
        elif revision not in {None, "main", dataset.commit}:
            self._refuse(404, "RevisionNotFound")
        else:
            return dataset
        return None

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Answer an upload, which is a request with a body."""
        path = unquote(urlsplit(self.path).path)
        hub = self.server.hub
        hub.requests.append(Seen(self.command, path, self.headers.get("Authorization"), None))
        body = self._read_body()
        if hub.upload_status is not None and "/commit/" in path:
            self._refuse(hub.upload_status, None)
            return
        for pattern, receive in UPLOAD_ROUTES:
            if match := pattern.fullmatch(path):
                receive(self, hub, match, body)
                return
        self._refuse(404, None)

    do_PUT = do_POST

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    # Uploads

    def _create(self, hub: FakeHub, match: re.Match[str], body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        repositories = hub.repositories(asked.get("type"))
        if name in repositories:
            self._send_json({"url": f"{hub.url}/datasets/{name}", "error": "exists"}, status=409)
            return
        repositories[name] = FakeDataset({}, private=asked.get("private", asked.get("visibility") == "private"))
        self._send_json({"url": f"{hub.url}/datasets/{name}", "name": name})

    def _validate(self, hub: FakeHub, match: re.Match[str], body: bytes) -> None:
        self._send_json({"errors": [], "warnings": []})

    def _preupload(self, hub: FakeHub, match: re.Match[str], body: bytes) -> None:
        paths = [file["path"] for file in json.loads(body)["files"]]
        modes = ["lfs" if PurePosixPath(path).suffix in LFS_SUFFIXES else "regular" for path in paths]
        files = [{"path": path, "uploadMode": mode} for path, mode in zip(paths, modes, strict=True)]
        self._send_json({"files": [file | {"shouldIgnore": False} for file in files]})

    def _batch(self, hub: FakeHub, match: re.Match[str], body: bytes) -> None:
        objects: list[dict[str, Any]] = [
            {"oid": each["oid"], "size": each["size"], "authenticated": True} for each in json.loads(body)["objects"]
        ]
        for each in objects:
            if each["oid"] not in hub.stored:
                each["actions"] = {"upload": {"href": f"{hub.storage_url}/uploads/{each['oid']}"}}
        self._send_json({"transfer": "basic", "objects": objects})

    def _store(self, hub: FakeHub, match: re.Match[str], body: bytes) -> None:
        hub.stored[match["oid"]] = body
        self._send_headers(200, {}, 0)

    def _commit(self, hub: FakeHub, match: re.Match[str], body: bytes) -> None:
        dataset = hub.repositories(match["kind"])[match["name"]]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                dataset.files[value["path"]] = FakeFile(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                dataset.files[value["path"]] = FakeFile(hub.stored[value["oid"]], lfs=True)
            elif line["key"] == "deletedFile":
                del dataset.files[value["path"]]
        url = f"{hub.url}/datasets/{match['name']}/commit/{dataset.commit}"
        self._send_json({"success": True, "commitOid": dataset.commit, "commitUrl": url})

    # Answers

    def _info(self, dataset: FakeDataset, match: re.Match[str]) -> None:
        siblings = [
            {"rfilename": path, "size": len(file.content), "blobId": file.blob_id, **_lfs(file, "sha256")}
            for path, file in dataset.files.items()
        ]
        self._send_json({"id": match["name"], "sha": dataset.commit, "private": False, "siblings": siblings})

    def _tree(self, dataset: FakeDataset, match: re.Match[str]) -> None:
        folders = {str(parent) for path in dataset.files for parent in PurePosixPath(path).parents} - {"."}
        entries: list[dict[str, Any]] = [
            {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in sorted(folders)
        ]
        entries += [
            {"type": "file", "path": path, "size": len(file.content), "oid": file.blob_id, **_lfs(file, "oid")}
            for path, file in dataset.files.items()
        ]
        self._send_json(entries)

    def _resolve(self, dataset: FakeDataset, match: re.Match[str]) -> None:
        file = dataset.files.get(match["path"])
        if file is None:
            self._refuse(404, "EntryNotFound")
        elif dataset.gated:
            self._refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo")
        elif file.resolve_status is not None and file.downloads < file.faulty_downloads:
            file.downloads += 1
            self._refuse(file.resolve_status, None)
        elif file.lfs:
            place = f"{match['kind'] or 'models'}/{match['name']}/{dataset.commit}/{match['path']}"
            location = f"{self.server.hub.storage_url}/{place}"
            linked = {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.content))}
            self._send_headers(302, {"Location": location, "X-Repo-Commit": dataset.commit, **linked}, 0)
        else:
            self._send_file(file, dataset.commit)

    def _stored(self, dataset: FakeDataset, match: re.Match[str]) -> None:
        self._send_file(dataset.files[match["path"]], dataset.commit)

    def _send_file(self, file: FakeFile, commit: str) -> None:
        start, status = 0, 200
        headers = {"ETag": f'"{file.etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        size = len(file.content)
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start, status = int(asked[1]), 206
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        self._send_headers(status, headers, size - start)
        if self.command == "HEAD":
            return
        file.downloads += 1
        body, end = file.content, size
        if file.downloads <= file.faulty_downloads:
            if file.corrupt:
                body = body[:-1] + bytes([body[-1] ^ 1])
            end = size if file.truncate_at is None else file.truncate_at
            self.server.hub.released.wait(file.delay_seconds)
        self.wfile.write(body[start:end])
        if end < size:
            self._hang_up(reset=file.reset)

    def _hang_up(self, *, reset: bool) -> None:
        self.close_connection = True
        if reset:
            # Closing with a linger time of zero sends RST; detached, because the server would first send FIN.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())

    def _send_json(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self._send_headers(status, {"Content-Type": "application/json"}, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str | None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": f"refused: {code}"} if code else {}
        self._send_headers(status, headers, 0)

    def _send_headers(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def _lfs(file: FakeFile, hash_key: str) -> dict[str, Any]:
    """Return the LFS entry of a file, empty for other files. The Hub calls the hash in it `sha256` in a repository's
    description and `oid` in a listing."""
    if not file.lfs:
        return {}
    return {"lfs": {hash_key: file.sha256, "size": len(file.content), "pointerSize": 134}}


KIND = r"(?P<kind>datasets|models)"
NAME = r"(?P<name>[^/]+/[^/]+)"
Answer = Callable[[_Handler, FakeDataset, "re.Match[str]"], None]
ROUTES: list[tuple[re.Pattern[str], Answer]] = [
    (re.compile(rf"/api/{KIND}/{NAME}(/revision/(?P<revision>[^/]+))?"), _Handler._info),
    (re.compile(rf"/api/{KIND}/{NAME}/tree/(?P<revision>[^/]+)"), _Handler._tree),
    (re.compile(rf"(/(?P<kind>datasets))?/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)"), _Handler._resolve),
    (re.compile(rf"/{KIND}/{NAME}/(?P<revision>[^/]+)/(?P<path>.+)"), _Handler._stored),
]
Receive = Callable[[_Handler, FakeHub, "re.Match[str]", bytes], None]
UPLOAD_ROUTES: list[tuple[re.Pattern[str], Receive]] = [
    (re.compile(r"/api/repos/create"), _Handler._create),
    (re.compile(r"/api/validate-yaml"), _Handler._validate),
    (re.compile(rf"/api/{KIND}/{NAME}/preupload/main"), _Handler._preupload),
    (re.compile(rf"(/(?P<kind>datasets))?/{NAME}\.git/info/lfs/objects/batch"), _Handler._batch),
    (re.compile(r"/uploads/(?P<oid>[0-9a-f]{64})"), _Handler._store),
    (re.compile(rf"/api/{KIND}/{NAME}/commit/main"), _Handler._commit),
]
