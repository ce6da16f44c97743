"""A run's folder in a mirror. A mirror is a bucket, a server or another disk. Every file in it appears whole or not at
all."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.common.errors import RunError, UserError, printable
from harness.common.files import FULL_DISK
from harness.common.messages import REASON_CHARACTERS, quoted

# By scheme: the extra in pyproject.toml that installs its library. rent.sh has this list, too.
EXTRAS = {"s3": "s3", "gs": "gcs", "sftp": "sftp"}
CREDENTIALS = {
    "hf": "HF_TOKEN or `hf auth login`; `hf buckets create` makes a bucket",
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws; AWS_ENDPOINT_URL for other providers",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "sftp": "your ssh key or agent, and the server's key in ~/.ssh/known_hosts",
    "file": "the permissions of that folder",
    "memory": "nothing",  # lives as long as the process; for tests
}
FOLDERS = {"file", "sftp"}  # the schemes whose folders must be made, and whose files must be renamed to appear whole
DRAFT_ENDING = ".partial"
PROBE = ".probe"  # written as a trial
PIECE = 2**25  # bytes that a download asks for at once, and the most that an interrupted one loses
NETWORK_SECONDS = 60.0  # of silence, after which a connection counts as failed
SECRETS = re.compile(r"TOKEN|SECRET|PASSWORD|ACCESS_KEY")  # in the names of environment variables
USER_IN_URL = re.compile(r"(://)(\S*:\S*@|[^/\s]*@)")  # a password can have "/" and "@" in it
OPENING_TRIES = 3
# Text in errors of a store that refuses access or lacks the bucket, if its library has no exception class for that. The
# Hub, for example, raises a ConnectionError with the text "… 401 Unauthorized".
REFUSED = re.compile(r"redential|uthenticat|\b40[134]\b")


class Mirror:
    """The folder of one run in a mirror or, if `run_name` is empty, of all runs. Paths are relative to that folder,
    with forward slashes. Methods raise the errors of the store's library, which `reason_of` turns into text."""

    def __init__(self, url: str, run_name: str) -> None:
        """Check the URL. Nothing is read or written. Raises UserError if the URL is wrong, or if the library for its
        scheme is not installed."""
        self.scheme = check_url(url)
        self.run_name = run_name
        self.url = url.rstrip("/")
        self.name = f"{self.url}/{run_name}".rstrip("/")
        self.open()

    _opened: Any

    def open(self) -> None:
        """Make the next use connect anew, without earlier caches or connections. Raises UserError if the library for
        the mirror's scheme is not installed."""
        import fsspec

        options: dict[str, Any] = {"skip_instance_cache": True}
        if self.scheme == "s3":
            # s3fs tries five times, too; botocore's own five tries would make that 25 silences of NETWORK_SECONDS.
            twice = {"total_max_attempts": 2}
            options |= {"config_kwargs": {"connect_timeout": 10, "read_timeout": NETWORK_SECONDS, "retries": twice}}
        try:
            fsspec.get_filesystem_class(self.scheme)
            if self.scheme == "hf":  # huggingface_hub writes a line for each of its retries
                from huggingface_hub import get_session
                from huggingface_hub import logging as hub_logging

                hub_logging.set_verbosity_error()
                get_session().timeout = NETWORK_SECONDS  # by default it waits without end
            if self.scheme == "sftp":
                logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # it writes tracebacks to standard error
                options |= {"timeout": 10, "banner_timeout": NETWORK_SECONDS, "host_key_policy": _known_hosts_only()}
            else:
                options |= {"use_listings_cache": False}
        except ImportError:
            extra = EXTRAS.get(self.scheme, self.scheme)
            raise UserError(
                f"mirror {self.name}: its library is not installed: use `uv run --extra {extra} ...`, or run "
                f"`uv sync --extra {extra}` once"
            ) from None
        self._options, self._opened = options, None

    @property
    def _fs(self) -> Any:
        """The file system, connected at the first use."""
        import fsspec

        if self._opened is None:
            self._opened, self._root = fsspec.core.url_to_fs(self.name, **self._options)
            if self.scheme == "sftp":
                self._opened.ftp.get_channel().settimeout(NETWORK_SECONDS)
            if self.scheme == "s3":  # aiohttp waits without end for an answer to the header Expect
                self._opened.connect()
                self._opened.s3.meta.events.register_last("before-call", _expect_nothing)
        self._opened.invalidate_cache()  # HfFileSystem keeps listings whatever its options are
        return self._opened

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def files(self) -> dict[str, int]:
        """Return the size in bytes of every file below the run's folder, by path."""
        fs = self._fs
        try:
            found = _find(fs, self._root) if self.scheme in FOLDERS else fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._root.strip("/")) + 1
        return {name.strip("/")[start:]: int(info["size"] or 0) for name, info in sorted(found.items())}

    def runs(self) -> list[str]:
        """Return the sorted names of the folders in a mirror that was opened without a run's name."""
        fs = self._fs
        try:
            listed = fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(each["name"].rstrip("/").rpartition("/")[2] for each in listed if each["type"] == "directory")

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes | None:
        """Return a file's contents, or only the bytes from `start` up to, but not including, `end`. Return None if
        there is no such file."""
        # s3fs otherwise asks for the size first. If that fails, its error lacks the reason, such as an expired token.
        options = {"max_concurrency": 1} if self.scheme == "s3" else {}
        try:
            return bytes(self._fs.cat_file(self._at(path), start=start, end=end, **options))
        except FileNotFoundError:
            return None

    def write(self, path: str, data: bytes) -> None:
        """Write a small file, in place of an earlier one."""
        if self.scheme == "hf":
            self._put_into_bucket(path, data)
        else:
            self._put(path, lambda fs, target: fs.pipe_file(target, data), len(data))

    def send(self, path: str, local: Path, progress: Callable[[int], None]) -> None:
        """Write the file `local` to `path`. `progress` is called with the number of bytes sent so far; at hf://, file://
        and sftp://, it is never called."""
        from fsspec.callbacks import Callback

        if self.scheme == "hf":
            self._put_into_bucket(path, local)
            return
        callback = Callback(hooks={"progress": lambda size, sent: progress(sent)})
        self._put(path, lambda fs, target: fs.put_file(str(local), target, callback=callback), local.stat().st_size)

    def _put(self, path: str, put: Callable[[Any, str], None], size: int) -> None:
        fs, final = self._fs, self._at(path)
        target = final
        if self.scheme in FOLDERS:
            folder, _, name = final.rpartition("/")
            fs.makedirs(folder, exist_ok=True)
            target = f"{folder}/.{name}{DRAFT_ENDING}"
        try:
            put(fs, target)
        except OSError as error:
            if error.errno in FULL_DISK and target != final:  # else half of a large file leaves no room for owner.json
                with suppress(OSError):
                    fs.rm(target)
            raise
        fs.invalidate_cache()
        found = fs.info(target)["size"]
        if found != size:
            raise OSError(f"{path}: {size:,} bytes were sent, and the store holds {found:,}")
        if target != final:
            fs.mv(target, final)

    def _put_into_bucket(self, path: str, source: bytes | Path) -> None:
        """Write a file into a bucket of the Hub, which verifies it by its hash. Does not use fsspec, which would first
        copy the file to the folder of temporary files."""
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars

        _, owner, name, target = f"{self.name}/{path}".removeprefix("hf://").split("/", 3)
        with disable_progress_bars():  # enables them again, since a later download of a dataset has a bar
            HfApi().batch_bucket_files(f"{owner}/{name}", add=[(source, target)])

    def delete(self, *paths: str) -> None:
        """Delete files, or folders with all that is in them. Paths that do not exist are ignored."""
        for path in paths:
            with suppress(FileNotFoundError):
                self._fs.rm(self._at(path), recursive=True)

    def modified(self, path: str) -> float | None:
        """Return the time at which a file was written, in seconds since 1970 by the store's own clock, or None if the
        file is missing or the store does not say."""
        fs, file = self._fs, self._at(path)
        with suppress(FileNotFoundError, NotImplementedError):
            time_of_store = fs.info(file).get("uploaded_at") or fs.modified(file)
            if isinstance(time_of_store, datetime):
                return time_of_store.timestamp()
        return None


def _find(fs: Any, folder: str) -> dict[str, Any]:
    """Return the entries of all files below `folder`, by path. Missing and forbidden folders count as empty. Unlike
    `fs.find`, raises any other OSError, such as that of a lost connection."""
    found: dict[str, Any] = {}
    with suppress(FileNotFoundError, PermissionError):  # deleted meanwhile, or not ours, such as lost+found
        for info in fs.ls(folder, detail=True):
            found |= _find(fs, info["name"]) if info["type"] == "directory" else {info["name"]: info}
    return found


def _expect_nothing(params: dict[str, Any], **_: Any) -> None:
    params["headers"].pop("Expect", None)


def _known_hosts_only() -> Any:
    """Return a policy for paramiko by which a server's key must be in ~/.ssh/known_hosts. Without it, fsspec trusts any
    server that answers."""
    import paramiko

    class KnownHostsOnly(paramiko.MissingHostKeyPolicy):
        def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
            known = paramiko.HostKeys()
            with suppress(OSError):
                known.load(os.path.expanduser("~/.ssh/known_hosts"))
            if not known.check(hostname, key):
                raise PermissionError(f"the key of {hostname} is not in ~/.ssh/known_hosts; connect once by ssh")

    return KnownHostsOnly()


def check_url(url: str) -> str:
    """Return the scheme of a mirror's URL. Raises UserError if the URL is wrong, or if it has a query or credentials,
    which would be recorded in the run's files."""
    scheme, separator, rest = url.partition("://")
    shown = quoted(printable_url(url))
    known = [name for name in CREDENTIALS if name != "memory"]
    if not separator or scheme not in CREDENTIALS:
        there = ", ".join(f"{name}://" for name in known)
        raise UserError(f'mirror {shown} (URL, --mirror or "mirror" in train.json): unknown scheme; use one of {there}')
    user = rest.partition("/")[0].rpartition("@")[0]
    if "?" in rest or ":" in rest.rpartition("@")[0] or (user and scheme != "sftp"):
        raise UserError(f'mirror {shown}: must have no credentials and no "?"; access is by {CREDENTIALS[scheme]}')
    parts = [part for part in rest.split("/") if part]
    if scheme == "hf" and (parts[:1] != ["buckets"] or len(parts) < 3):
        raise UserError(f"mirror {shown}: must be hf://buckets/OWNER/NAME, with or without a folder after it")
    if scheme == "file" and parts and not rest.startswith("/"):
        raise UserError(f"mirror {shown}: must be an absolute path, as in file:///mnt/disk/runs")
    if not parts or ".." in parts or any(each in rest for each in "*[]#") or "::" in rest:
        raise UserError(f"mirror {shown}: must be a plain address without .. :: * [ ] #, as in s3://BUCKET/FOLDER")
    return scheme


def printable_url(url: str) -> str:
    """Return a URL, or text that is no URL, without user, password, query and fragment."""
    url = re.sub(r"[?#].*", "?…", url)
    return USER_IN_URL.sub(r"\1", url) if "://" in url else url.rpartition("@")[2]


def reason_of(error: BaseException) -> str:
    """Return an error's type and first line, cut to REASON_CHARACTERS, without what may be a secret: users, passwords
    and queries in URLs, the Hub's token, and the values of environment variables with names like HF_TOKEN."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    for name, value in os.environ.items():
        if SECRETS.search(name) and len(value) > 5:
            line = line.replace(value, "***")
    with suppress(Exception):  # the token that `hf auth login` has stored
        import huggingface_hub

        line = line.replace(huggingface_hub.get_token() or "\0", "***")
    line = USER_IN_URL.sub(r"\1", re.sub(r"\?\S+", "?…", line))
    line = re.sub(r"(?i)((?:signature|token|secret|credential)\w*[=:]\s*)\S+", r"\1***", line)
    return printable(f"{type(error).__name__}: {line[:REASON_CHARACTERS]}".rstrip(": "))


def open_mirror(url: str, run_name: str, *, writes: bool = True) -> Mirror:
    """Return a mirror after a trial: with `writes`, a file is written and deleted; otherwise the folder is listed.
    Raises UserError if URL or credentials are wrong or a library is missing, and RunError for any other failure."""
    mirror = Mirror(url, run_name)
    for left in reversed(range(OPENING_TRIES)):
        try:
            if writes:
                mirror.write(PROBE, b"this file is removed at once\n")
                mirror.delete(PROBE)
            elif run_name:
                mirror.files()
            else:
                mirror.runs()
            break
        except Exception as error:
            lasting = isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError | ValueError)
            lasting = lasting or bool(REFUSED.search(f"{type(error).__name__} {error}"))
            if lasting or not left:
                verb = "written to" if writes else "read"
                is_full = getattr(error, "errno", None) in FULL_DISK
                remedy = "make room there" if is_full else f"check the address and {CREDENTIALS[mirror.scheme]}"
                raise (UserError if lasting else RunError)(
                    f"mirror {mirror.name}: cannot be {verb} ({reason_of(error)}): {remedy}; "
                    "ddp_train.py --mirror none trains without it"
                ) from None
        time.sleep(2.0 ** (OPENING_TRIES - left - 1))
        mirror.open()
    return mirror
