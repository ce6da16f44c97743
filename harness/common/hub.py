"""Access to the Hugging Face Hub: list a repository's files, verify downloaded files, upload, and explain the Hub's
errors to the user."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import huggingface_hub
from huggingface_hub import errors as hub_errors
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from huggingface_hub.utils.sha import git_hash
from huggingface_hub.utils.tqdm import disable_progress_bars

from harness.common.errors import UserError
from harness.common.files import FULL_DISK, sha256

RETRY_PAUSE_SECONDS = 1.0
SHORTEST_TOKEN = 6  # a shorter text is no secret, and masking it would also mask parts of ordinary words
INFO_TIMEOUT_SECONDS = 30.0  # without a timeout huggingface_hub waits forever
# Files of the repository that are about git or the download itself, not about the dataset.
IGNORED_FILES = [".git*", ".cache/*"]
CARD = "README.md"

Result = TypeVar("Result")


@dataclass(frozen=True)
class HubWork:
    """Description of a download from a Hub repository or an upload to one, with texts for error messages."""

    name: str  # owner/name
    kind: str  # "dataset" or "model"
    folder: Path  # local folder that is written or read
    named_by: str  # where the user gave the name: 'the "dataset" key in train.json'
    by_hand: str  # what the user can do instead: "upload the folder by hand"
    again: str = "running the same command again resumes"  # what a second try does
    verb: str = "read"  # what the user's token must permit: "read" or "write to"

    def failed(self, problem: str, remedy: str) -> UserError:
        """Return the one-line error for the user. The user's token is masked in case a library's message quotes it."""
        line = " ".join(f'{self.kind} "{self.name}": {problem}; {remedy}'.split())
        token = huggingface_hub.get_token() or ""
        for secret in (token, repr(token)[1:-1]) if len(token) >= SHORTEST_TOKEN else ():
            line = line.replace(secret, "***")
        return UserError(line)

    def call(self, function: Callable[[], Result], *, retries: int = 1) -> Result:
        """Call `function`, which uses huggingface_hub, and return its result.

        If the call fails and a retry can help, `function` is called again, at most `retries` times. Raises UserError
        for any Exception of the last call.
        """
        # huggingface_hub's own retries miss a connection reset while a response is read, and any failure of the first
        # request.
        try:
            return function()
        except Exception as error:  # the errors of httpx, xet and the system have no other common base class
            problem, remedy, is_transient = self._explain(error)
            if not (is_transient and retries):
                raise self.failed(problem, remedy) from None
        time.sleep(RETRY_PAUSE_SECONDS)
        return self.call(function, retries=retries - 1)

    def _explain(self, error: BaseException) -> tuple[str, str, bool]:
        """Return the problem behind `error`, its remedy, and True if a retry can help."""
        # The causes are examined, too, because huggingface_hub wraps errors in others that say less.
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, hub_errors.HfHubHTTPError):
                return self._explain_answer(cause)
            if isinstance(cause, hub_errors.OfflineModeIsEnabled):
                problem = "not on this machine, and" if self.verb == "read" else "needs the network, but"
                return f"{problem} HF_HUB_OFFLINE is set", f"unset HF_HUB_OFFLINE, or {self.by_hand}", False
            if isinstance(cause, hub_errors.HFValidationError):
                return "not a valid name on the Hugging Face Hub", f"check {self.named_by}", False
            if isinstance(cause, OSError) and (cause.filename or cause.errno in FULL_DISK):
                return *self.explain_local(cause), False
            error, cause = cause, cause.__cause__
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
        remedy = f"check the network and HF_ENDPOINT ({self.again}), or {self.by_hand}"
        return f"the connection to the Hugging Face Hub failed ({reason})", remedy, True

    def _explain_answer(self, error: hub_errors.HfHubHTTPError) -> tuple[str, str, bool]:
        """Return the same as `_explain`, for an answer of the Hub with an HTTP error status."""
        status = error.response.status_code
        problem, remedy = f"the Hugging Face Hub answered with status {status}", f"try again later; {self.again}"
        if isinstance(error, hub_errors.GatedRepoError):
            problem = f"gated on the Hugging Face Hub (status {status})"
            remedy = "accept its conditions on its page there and set HF_TOKEN"
        elif isinstance(error, hub_errors.RevisionNotFoundError):
            problem, remedy = f"no such revision on the Hugging Face Hub (status {status})", "check --revision"
        elif isinstance(error, hub_errors.RepositoryNotFoundError) or status == 404:
            problem = f"not found on the Hugging Face Hub, or private (status {status})"
            remedy = f"check {self.named_by}, and set HF_TOKEN if the {self.kind} is private"
        elif status in {401, 403}:
            problem = f"access refused by the Hugging Face Hub (status {status})"
            remedy = f"set HF_TOKEN to a token that may {self.verb} it"
        return problem, f"{remedy}; or {self.by_hand}", status >= 500

    def explain_local(self, error: OSError) -> tuple[str, str]:
        """Return the problem and the remedy for a local file error."""
        where = self.folder.parent
        if error.errno in FULL_DISK:
            return f"no space left for {where}", f"free some; {self.again}"
        return f"{error.filename or where}: {error.strerror}", f"check that {where} can be written to; {self.again}"


def list_files(work: HubWork, revision: str | None = None) -> tuple[str, list[RepoSibling]]:
    """Return the commit hash of a dataset's `revision` (None: the newest commit), and its files with the Hub's hashes.

    IGNORED_FILES are left out. Raises UserError if the Hub cannot be read, if no file is left, or if a path leads out
    of the download folder.
    """
    info = work.call(
        lambda: huggingface_hub.HfApi().dataset_info(
            work.name, revision=revision, files_metadata=True, timeout=INFO_TIMEOUT_SECONDS
        )
    )
    files = list(
        filter_repo_objects(info.siblings or [], ignore_patterns=IGNORED_FILES, key=lambda file: file.rfilename)
    )
    if info.sha is None or not files:
        raise work.failed("the repository holds no dataset files", work.by_hand)
    for path in (file.rfilename for file in files):
        # With such a path, a hostile endpoint could have any file of this machine overwritten.
        if "\0" in path or any(part in {"", ".", ".."} for part in path.split("/")):
            problem = f"the repository lists {path!r}, which leads out of the dataset's folder"
            raise work.failed(problem, f"check HF_ENDPOINT; or {work.by_hand}")
    return info.sha, files


def find_fault(path: Path, file: RepoSibling) -> str | None:
    """Return the fault of a downloaded file as text (missing, or another hash than the Hub's), or None if there is
    none."""
    if not path.is_file():
        return "expected a file, found none"
    if file.lfs:
        kind, expected, found = "SHA-256", file.lfs.sha256, sha256(path)
    else:
        found = git_hash(path.read_bytes())
        kind, expected = "SHA-1", file.blob_id or found
    return None if found == expected else f"expected {kind} {expected}, found {found}"


def hide_bars_from_files() -> None:
    """Switch off huggingface_hub's progress bars if standard error is not a terminal."""
    if not sys.stderr.isatty():
        disable_progress_bars()


def upload(
    work: HubWork, files: dict[str, Path | bytes], message: str, *, public: bool, is_replaced: Callable[[str], bool]
) -> str:
    """Upload `files` as one commit to the repository that `work` names, and return the repository's URL.

    `files` maps paths in the repository to local files or contents. A missing repository is created; `public` has no
    effect on an existing one. A file that is only in the repository is deleted if `is_replaced(path)` is true. Raises
    UserError if a request to the Hub fails.
    """
    hide_bars_from_files()
    api, name, kind = huggingface_hub.HfApi(), work.name, work.kind
    work.call(lambda: api.create_repo(name, repo_type=kind, private=not public, exist_ok=True))
    there = work.call(lambda: api.list_repo_files(name, repo_type=kind))
    # Not upload_folder: with hf_xet it makes several commits, between which the repository mixes old and new files.
    operations: list[huggingface_hub.CommitOperationAdd | huggingface_hub.CommitOperationDelete] = [
        *(huggingface_hub.CommitOperationAdd(path, file) for path, file in files.items()),
        *(huggingface_hub.CommitOperationDelete(path) for path in there if path not in files and is_replaced(path)),
    ]
    work.call(lambda: api.create_commit(name, operations, commit_message=message, repo_type=kind))
    return f"{api.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"
