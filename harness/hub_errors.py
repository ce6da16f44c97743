"""What huggingface_hub raises, as one line that says what it means to the user and what to do."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import huggingface_hub
from huggingface_hub import errors as hub_errors

from harness.errors import UserError

RETRY_PAUSE_SECONDS = 1.0
SHORTEST_TOKEN = 6  # what is shorter is no secret, and part of other words

Result = TypeVar("Result")


class Diagnosis(NamedTuple):
    """What an exception of the library means to the user, and whether trying again can help."""

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
        """What the Hub's refusal means; it answers 401 both for private repositories and for ones that do not exist."""
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
        """What the system's refusal means: a full disk, or a place that cannot be written to."""
        where = self.folder.parent
        if _is_full(error):
            return Diagnosis(f"no space left for {where}", f"free some; {self.again}")
        return Diagnosis(f"{error.filename}: {error.strerror}", f"check that {where} can be written to; {self.again}")


def _is_full(error: OSError) -> bool:
    return error.errno in {errno.ENOSPC, errno.EDQUOT}
