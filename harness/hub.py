"""A dataset repository on the Hugging Face Hub, downloaded and verified into a local folder."""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import hashlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn, TypeVar

import huggingface_hub
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils.tqdm import disable_progress_bars
from tqdm import tqdm

from harness.errors import UserError
from harness.files import sync

# Files of the repository that are about git or the download itself, not about the dataset.
IGNORED_FILES = [".git*", ".cache/*"]
INFO_TIMEOUT_SECONDS = 30.0  # huggingface_hub waits for ever where none is given
RETRY_PAUSE_SECONDS = 1.0
HASH_CHUNK_BYTES = 4 * 2**20
GIB = 2**30

Result = TypeVar("Result")


@dataclass(frozen=True)
class HubFile:
    """One file of the repository as the Hub describes it; LFS files have a SHA-256, the others a git blob SHA-1."""

    path: str
    size: int | None
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True)
class Download:
    """What goes where: the dataset's name, its final folder, and the hidden sibling that collects the files."""

    name: str
    folder: Path

    @property
    def partial(self) -> Path:
        return self.folder.parent / f".{self.folder.name}.partial"

    def failed(self, problem: str, remedy: str) -> UserError:
        """The one line a user sees, without the token even where a library's text quotes it."""
        line = " ".join(f'dataset "{self.name}": {problem}; {remedy}'.split())
        token = huggingface_hub.get_token()
        for secret in (token, repr(token)[1:-1]) if token else ():
            line = line.replace(secret, "***")
        return UserError(line)


class Diagnosis(NamedTuple):
    """What an exception of the library means to the user, and whether trying again can help."""

    problem: str
    remedy: str
    transient: bool = False


def download_dataset(name: str, folder: Path) -> None:
    """Download the dataset repository `name` (owner/name), verify it, and put it at `folder` in one rename.

    `folder` does not exist yet or is an empty directory. Until everything is verified the files lie in a hidden sibling
    folder, from which the next call resumes. HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN count, as everywhere
    with huggingface_hub. SIGINT and SIGTERM end the process at once while this runs. Raises UserError.
    """
    download = Download(name, folder)
    try:
        with _leaving_at_once(download), _alone_in(download.partial):
            if not _is_filled(folder):
                _fetch(download)
            else:  # another process was faster
                shutil.rmtree(download.partial, ignore_errors=True)
    except OSError as error:
        problem = f"{error.filename or download.partial}: {error.strerror or error}"
        raise download.failed(problem, _diagnose_local(error, download).remedy) from None


def _is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _fetch(download: Download) -> None:
    if not sys.stderr.isatty():
        disable_progress_bars()
    revision, files = _ask_for_files(download)
    _clear_leftovers(download.partial, files)
    _check_space(download, files)
    # Pinned to one commit, so that a push in between does not mix versions.
    _library(
        download,
        lambda: huggingface_hub.snapshot_download(
            download.name,
            repo_type="dataset",
            revision=revision,
            local_dir=download.partial,
            ignore_patterns=IGNORED_FILES,
        ),
    )
    _verify(download, files, revision)
    shutil.rmtree(download.partial / ".cache")
    _flush(download.partial)
    os.rename(download.partial, download.folder)
    sync(download.folder.parent)


def _ask_for_files(download: Download) -> tuple[str, list[HubFile]]:
    """Return the newest commit and its files."""
    info = _library(
        download,
        lambda: huggingface_hub.HfApi().dataset_info(download.name, files_metadata=True, timeout=INFO_TIMEOUT_SECONDS),
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
        raise download.failed("the repository holds no files", _put_files_there(download))
    for file in files:
        if not _stays_inside(file.path):
            problem = f"the repository lists {file.path!r}, which leads out of the dataset's folder"
            raise download.failed(problem, f"check HF_ENDPOINT; or {_put_files_there(download)}")
    return info.sha, files


def _stays_inside(path: str) -> bool:
    """Whether a path from elsewhere, put below a folder, stays there: a hostile endpoint might name any file of this
    machine, to be written or, where its hash differs, deleted."""
    return "\0" not in path and all(part not in {"", ".", ".."} for part in path.split("/"))


def _clear_leftovers(partial: Path, files: list[HubFile]) -> None:
    """Delete what an earlier, interrupted download left and this one cannot use.

    huggingface_hub writes every file under a name of its own until it is whole, and never comes back to it.
    """
    wanted = {partial / file.path for file in files}
    for path in [path for path in partial.rglob("*") if path.is_symlink()]:
        path.unlink()  # a download makes none, and what is written or deleted through one lies elsewhere
    for path in _files_in(partial):
        unfinished = path.suffix == ".incomplete"
        other_version = path not in wanted and not path.is_relative_to(partial / ".cache")
        if unfinished or other_version:
            path.unlink()


def _check_space(download: Download, files: list[HubFile]) -> None:
    needed = sum(file.size or 0 for file in files if _size(download.partial / file.path) != file.size)
    free = shutil.disk_usage(download.partial).free
    if needed > free:
        problem = f"{needed / GIB:.2f} GiB to download, but only {free / GIB:.2f} GiB free for {download.folder}"
        raise download.failed(problem, "free some space, or use a datasets directory on a larger disk")


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


# What the library raises -------------------------------------------------------------------------------------------


def _library(download: Download, call: Callable[[], Result]) -> Result:
    """Call into huggingface_hub, a second time where that can help. Raises UserError for all its failures.

    Its own retries miss some (a connection reset while a body arrives, any failure of the first request). `Exception`,
    because it lets through what lies below it: httpx's, xet's and the operating system's, without a common class.
    """
    try:
        return call()
    except Exception as error:
        diagnosis = _diagnose(error, download)
        if not diagnosis.transient:
            raise download.failed(diagnosis.problem, diagnosis.remedy) from None
    time.sleep(RETRY_PAUSE_SECONDS)
    try:
        return call()
    except Exception as error:
        diagnosis = _diagnose(error, download)
        raise download.failed(diagnosis.problem, diagnosis.remedy) from None


def _diagnose(error: BaseException, download: Download) -> Diagnosis:
    """The library wraps errors in others that say less, so that the causes are looked through as well."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, hub_errors.HfHubHTTPError):
            return _diagnose_answer(cause, download)
        if isinstance(cause, hub_errors.OfflineModeIsEnabled):
            remedy = f"unset HF_HUB_OFFLINE, or {_put_files_there(download)}"
            return Diagnosis("not on this machine, and HF_HUB_OFFLINE is set", remedy)
        if isinstance(cause, hub_errors.HFValidationError):
            return Diagnosis("not a name the Hugging Face Hub can have", 'check the "dataset" key in train.json')
        if isinstance(cause, OSError) and (cause.filename or _is_full(cause)):
            return _diagnose_local(cause, download)
        error, cause = cause, cause.__cause__
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
    remedy = f"check the network and HF_ENDPOINT; {_resume()}; or {_put_files_there(download)}"
    return Diagnosis(f"the connection to the Hugging Face Hub failed ({reason})", remedy, transient=True)


def _diagnose_answer(error: hub_errors.HfHubHTTPError, download: Download) -> Diagnosis:
    """What the Hub's refusal means; it answers 401 both for private repositories and for ones that do not exist."""
    status = error.response.status_code
    by_hand = _put_files_there(download)
    if isinstance(error, hub_errors.GatedRepoError):
        problem = f"gated on the Hugging Face Hub (status {status})"
        return Diagnosis(problem, f"accept its conditions on its page there and set HF_TOKEN, or {by_hand}")
    if isinstance(error, hub_errors.RepositoryNotFoundError) or status == 404:
        remedy = f'check the "dataset" key in train.json, set HF_TOKEN if the dataset is private, or {by_hand}'
        return Diagnosis(f"not found on the Hugging Face Hub, or private (status {status})", remedy)
    if status in {401, 403}:
        problem = f"access refused by the Hugging Face Hub (status {status})"
        return Diagnosis(problem, f"set HF_TOKEN to a token that may read it, or {by_hand}")
    problem = f"the Hugging Face Hub answered with status {status}"
    return Diagnosis(problem, f"try again later; {_resume()}; or {by_hand}", transient=status >= 500)


def _diagnose_local(error: OSError, download: Download) -> Diagnosis:
    where = download.folder.parent
    if _is_full(error):
        return Diagnosis(f"no space left for {where}", f"free some; {_resume()}")
    return Diagnosis(f"{error.filename}: {error.strerror}", f"check that {where} can be written to; {_resume()}")


def _is_full(error: OSError) -> bool:
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


def _put_files_there(download: Download) -> str:
    return f"put the dataset's files into {download.folder}"


def _resume() -> str:
    return "running the same command again resumes with the files still missing"


# Verification ------------------------------------------------------------------------------------------------------


def _verify(download: Download, files: list[HubFile], revision: str) -> None:
    """Compare every file with the Hub's size and hash, and download once more those that differ."""
    faults = _find_faults(download.partial, files)
    for file, fault in faults.items():
        print(f"{file.path}: {fault}; downloading it again", file=sys.stderr, flush=True)
        _fetch_again(download, file, revision)
    remaining = _find_faults(download.partial, faults)
    for file, fault in remaining.items():
        problem = f"{file.path} is not what the Hub describes, even downloaded twice: {fault}"
        remedy = f"try again later; or {_put_files_there(download)}"
        raise download.failed(problem, remedy)


def _fetch_again(download: Download, file: HubFile, revision: str) -> None:
    def call() -> str:
        return huggingface_hub.hf_hub_download(
            download.name,
            file.path,
            repo_type="dataset",
            revision=revision,
            local_dir=download.partial,
            force_download=True,  # or a bad copy in HF_HOME's cache would be taken
        )

    _library(download, call)


def _find_faults(partial: Path, files: Collection[HubFile]) -> dict[HubFile, str]:
    """Return what is wrong with which files, and delete those."""
    faults = {}
    total = sum(file.size or 0 for file in files)
    quiet = not files or not sys.stderr.isatty()
    with tqdm(desc="Verifying", total=total, unit="B", unit_scale=True, leave=False, disable=quiet) as bar:
        for file in files:
            if fault := _fault(partial / file.path, file, bar.update):
                faults[file] = fault
                (partial / file.path).unlink(missing_ok=True)
    return faults


def _fault(path: Path, file: HubFile, advance: Callable[[int], object]) -> str | None:
    size = _size(path)
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


# Files and processes -----------------------------------------------------------------------------------------------


def _files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def _flush(folder: Path) -> None:
    """Have everything on the disk before the rename says that the folder is whole."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


@contextmanager
def _alone_in(partial: Path) -> Iterator[None]:
    """Hold the partial folder: two jobs of one machine that want the same dataset take turns.

    The lock is on the directory itself, moves with it when it is renamed, and ends with the process.
    """
    if partial.is_symlink():
        raise UserError(f"{partial}: is a link, but what is left over in it would be deleted; remove the link")
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is downloading {partial}; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            pass  # some network file systems lock no directories; there the caller has to see to it
        partial.mkdir(exist_ok=True)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _leaving_at_once(download: Download) -> Iterator[None]:
    """Leave on SIGINT and SIGTERM without waiting: huggingface_hub would first finish the files under way (gigabytes).

    A kill at any instant is safe here, because nothing is under the final name before it is whole.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        print(f'\nstopped: dataset "{download.name}": {_resume()}', file=sys.stderr, flush=True)
        os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python sets signal handlers in the main thread only
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
