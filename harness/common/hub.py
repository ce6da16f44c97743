"""The Hugging Face Hub: which files a repository has, whether those here are the same, how files are uploaded, and what
its errors mean to the user. Every call of huggingface_hub goes through a `HubWork`, which tries again where that can
help, and turns whatever is raised into one line.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import huggingface_hub
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils.tqdm import disable_progress_bars

from harness.common.errors import UserError
from harness.common.files import HASH_CHUNK_BYTES

RETRY_PAUSE_SECONDS = 1.0
SHORTEST_TOKEN = 6  # what is shorter is no secret, and part of other words

INFO_TIMEOUT_SECONDS = 30.0  # huggingface_hub waits for ever where none is given
# Files of the repository that are about git or the download itself, not about the dataset.
IGNORED_FILES = [".git*", ".cache/*"]
CARD = "README.md"

Operation = huggingface_hub.CommitOperationAdd | huggingface_hub.CommitOperationDelete
Result = TypeVar("Result")


class Diagnosis(NamedTuple):
    """An exception of the library explained to the user: the problem, the remedy, and whether a retry can help."""

    problem: str
    remedy: str
    transient: bool = False


@dataclass(frozen=True)
class HubWork:
    """Something that is done with a repository on the Hub, in the words that its failures need."""

    name: str  # owner/name
    kind: str  # "dataset" or "model"
    folder: Path  # what is written to or read from, on this machine
    named_by: str  # where the user gave the name: 'the "dataset" key in train.json'
    by_hand: str  # what would do without the Hub
    again: str  # what doing it again does
    verb: str = "read"

    def failed(self, problem: str, remedy: str) -> UserError:
        """The one line a user sees, without the token even where a library's text quotes it."""
        line = " ".join(f'{self.kind} "{self.name}": {problem}; {remedy}'.split())
        token = huggingface_hub.get_token() or ""
        for secret in (token, repr(token)[1:-1]) if len(token) >= SHORTEST_TOKEN else ():
            line = line.replace(secret, "***")
        return UserError(line)

    def call(self, function: Callable[[], Result]) -> Result:
        """Call into huggingface_hub, a second time where that can help. Raises UserError for all its failures.

        Its own retries miss some (a connection reset while a body arrives, any failure of the first request).
        `Exception`, because it lets through what lies below it: httpx's, xet's and the operating system's, without a
        common class.
        """
        try:
            return function()
        except Exception as error:
            diagnosis = self.diagnose(error)
            if not diagnosis.transient:
                raise self.failed(diagnosis.problem, diagnosis.remedy) from None
        time.sleep(RETRY_PAUSE_SECONDS)
        try:
            return function()
        except Exception as error:
            diagnosis = self.diagnose(error)
            raise self.failed(diagnosis.problem, diagnosis.remedy) from None

    def diagnose(self, error: BaseException) -> Diagnosis:
        """The library wraps errors in others that say less, so that the causes are looked through as well."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, hub_errors.HfHubHTTPError):
                return self._diagnose_answer(cause)
            if isinstance(cause, hub_errors.OfflineModeIsEnabled):
                remedy = f"unset HF_HUB_OFFLINE, or {self.by_hand}"
                problem = "not on this machine, and" if self.verb == "read" else "is on the network, but"
                return Diagnosis(f"{problem} HF_HUB_OFFLINE is set", remedy)
            if isinstance(cause, hub_errors.HFValidationError):
                return Diagnosis("not a name the Hugging Face Hub can have", f"check {self.named_by}")
            if isinstance(cause, OSError) and (cause.filename or _is_full(cause)):
                return self.diagnose_local(cause)
            error, cause = cause, cause.__cause__
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
        remedy = f"check the network and HF_ENDPOINT; {self.again}; or {self.by_hand}"
        return Diagnosis(f"the connection to the Hugging Face Hub failed ({reason})", remedy, transient=True)

    def _diagnose_answer(self, error: hub_errors.HfHubHTTPError) -> Diagnosis:
        """Diagnose an HTTP error of the Hub, which answers 401 both for private repositories and for ones that do not
        exist."""
        status = error.response.status_code
        if isinstance(error, hub_errors.GatedRepoError):
            problem = f"gated on the Hugging Face Hub (status {status})"
            return Diagnosis(problem, f"accept its conditions on its page there and set HF_TOKEN, or {self.by_hand}")
        if isinstance(error, hub_errors.RepositoryNotFoundError) or status == 404:
            remedy = f"check {self.named_by}, set HF_TOKEN if the {self.kind} is private, or {self.by_hand}"
            return Diagnosis(f"not found on the Hugging Face Hub, or private (status {status})", remedy)
        if status in {401, 403}:
            problem = f"access refused by the Hugging Face Hub (status {status})"
            return Diagnosis(problem, f"set HF_TOKEN to a token that may {self.verb} it, or {self.by_hand}")
        problem = f"the Hugging Face Hub answered with status {status}"
        return Diagnosis(problem, f"try again later; {self.again}; or {self.by_hand}", transient=status >= 500)

    def diagnose_local(self, error: OSError) -> Diagnosis:
        """Diagnose an OSError: a full disk, or a place that cannot be written to."""
        where = self.folder.parent
        if _is_full(error):
            return Diagnosis(f"no space left for {where}", f"free some; {self.again}")
        return Diagnosis(f"{error.filename}: {error.strerror}", f"check that {where} can be written to; {self.again}")


def _is_full(error: OSError) -> bool:
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


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
    """True if a path in a repository's listing stays below the folder it is joined to: a hostile endpoint might name
    any file of this machine, to be written or, where its hash differs, deleted."""
    return "\0" not in path and all(part not in {"", ".", ".."} for part in path.split("/"))


def find_fault(path: Path, file: HubFile, advance: Callable[[int], object]) -> str | None:
    """Describe how a downloaded file differs from the expected size or hash; None if it does not. Calls `advance` with
    each number of bytes that it has read."""
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


def upload(
    work: HubWork, files: dict[str, Path | bytes], message: str, *, public: bool, is_replaced: Callable[[str], bool]
) -> str:
    """Upload files, by their paths in the repository that `work` names, made if it is not there; its address.

    A repository that is there keeps being private or public. What the Hub has already is not sent again. Files there
    of which `is_replaced(path)` is true and that are not among the new ones are removed; they stay in the repository's
    history. Raises UserError.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    api, name, kind = huggingface_hub.HfApi(), work.name, work.kind
    work.call(lambda: api.create_repo(name, repo_type=kind, private=not public, exist_ok=True))
    operations: list[Operation] = [huggingface_hub.CommitOperationAdd(path, file) for path, file in files.items()]
    there = work.call(lambda: api.list_repo_files(name, repo_type=kind))
    stale = [path for path in there if path not in files and is_replaced(path)]
    operations += [huggingface_hub.CommitOperationDelete(path) for path in stale]
    work.call(lambda: api.create_commit(name, operations, commit_message=message, repo_type=kind))
    return f"{api.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"
