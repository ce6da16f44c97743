"""Results in `results/` of a run's folder, each in a JSON file: measurements of the run's checkpoints, and results of
microbatch searches (`-f`). A repeated measurement or search replaces the earlier result. No command reads the results
of searches.

Measured models and texts are identified by hashes of their content.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from harness.common.errors import RunError, UserError, explained, os_errors_as
from harness.common.files import atomic_file, check_name
from harness.common.json_files import RecordedCount, read_json_object
from harness.data.ngrams import Overlap
from harness.runs.directory import SEARCH_PREFIX, RunDirectory

NAME_CHARACTERS = 12  # number of characters of the hash in a file's name
MEASURED_BATCH = 6  # sequences per batch of test_loss.py, if --batch-size is not given
REMEDY = "measure again, or move the file away"

Number = Annotated[float, Field(allow_inf_nan=False)]


class Recorded(BaseModel):
    """Base class of results and of most of their parts. Unknown keys, written by later versions, are kept."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


class MeasuredWeights(Recorded):
    """The weights that were measured."""

    checkpoint: str  # the name of its folder; IMPORTED (trained_model.py) for an imported model
    sha256: str  # of model.safetensors
    global_step: RecordedCount | None = None
    tokens_seen: RecordedCount | None = None
    is_best: bool = False  # True if the link `best` pointed to the checkpoint when it was measured, or if imported
    is_latest: bool = False  # the same for the link `latest`


class Text(Recorded):
    """The text that a loss was measured on: `windows` consecutive sequences of `context_length` tokens of a dataset."""

    dataset: str
    sha256: str  # TokenFile.fingerprint() of the split's file
    tokenizer: str  # "gpt2", or the SHA-256 of the tokenizer's file
    split: str
    start_token: RecordedCount
    windows: RecordedCount
    context_length: RecordedCount

    @property
    def content(self) -> tuple[str, str, int, int, int]:
        """Values that identify the text and its division into windows. Two losses were measured on the same text if
        these values are equal."""
        return self.sha256, self.tokenizer, self.start_token, self.windows, self.context_length


class Result(Recorded):
    """Base class of measurements of one checkpoint."""

    same: ClassVar[tuple[str, ...]] = ()  # the keys that are equal if a measurement was repeated

    kind: str
    date: str  # ISO 8601, UTC
    device: str
    torch: str
    weights: MeasuredWeights

    def name(self) -> str:
        """Return the name of the result's file, without suffix. It is the same if the measurement is repeated."""
        digest = _digest([self.kind, self.weights.sha256, self.model_dump(mode="json", include={*self.same})])
        return f"{self.kind.replace('_', '-')}-{self.weights.checkpoint}-{digest}"


def _digest(values: Any) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:NAME_CHARACTERS]


class LossResult(Result):
    """Result of test_loss.py. Beside its JSON file, a .safetensors file has the loss of each window, in the order of
    the text."""

    same: ClassVar[tuple[str, ...]] = ("text", "precision")

    kind: str = "test_loss"
    text: Text
    precision: str
    loss: Annotated[Number, Field(ge=0)] | None  # nats per token; None if not finite
    bits_per_byte: Annotated[Number, Field(ge=0)] | None = None
    # False: bits_per_byte was computed with the mean bytes per token of the whole split, not with the bytes of the
    # predicted tokens
    bits_are_exact: bool = True
    trained_on: Overlap | None = None  # how much of the split also occurs in the training text; None if unknown

    @property
    def windows_name(self) -> str:
        """Name of the file that holds one loss for each window (sequence) of `text`."""
        return f"{self.name()}.safetensors"


class BenchmarkScore(Recorded):
    """Value of one metric of a benchmark task, or of a group of tasks."""

    task: str
    metric: str
    value: Number | None
    stderr: Number | None = None
    examples: RecordedCount = 0
    higher_is_better: bool | None = None


class BenchmarkResult(Result):
    """Result of evaluate_benchmarks.py."""

    same: ClassVar[tuple[str, ...]] = ("tasks", "num_fewshot", "limit", "precision", "lm_eval")

    kind: str = "benchmarks"
    lm_eval: str  # version of lm-eval
    tasks: list[str]  # as the user gave them
    num_fewshot: RecordedCount | None = None
    limit: RecordedCount | None = None
    precision: str
    scores: list[BenchmarkScore]


class InstructionResult(Result):
    """Scores from 0 to 100 that a judge gave to a model's answers."""

    same: ClassVar[tuple[str, ...]] = (
        *("judge", "base_url", "prompt", "questions_sha256", "answers_sha256", "judging", "repeats"),
    )

    kind: str = "instructions"
    judge: str
    base_url: str | None = None
    prompt: str  # "together", "book" or "notebook"
    questions_sha256: str  # Responses.questions_sha256
    answers_sha256: str | None = None  # Responses.answers_sha256; None in files of earlier versions
    questions: RecordedCount
    repeats: RecordedCount  # times that each answer was judged
    judging: str  # hash of everything that was judged together: all answers of all models
    judged_with: list[str]  # labels of all models in that judging, including this one
    mean: Number | None
    low: Number | None  # 95 % interval
    high: Number | None
    scores: list[Number | None]  # by question; None if the judge gave no valid answer


KINDS: dict[str, type[Result]] = {str(kind.model_fields["kind"].default): kind for kind in Result.__subclasses__()}
AnyResult = TypeVar("AnyResult", bound=Result)
# Keys of the result of a microbatch search that are equal if the search was repeated.
SAME_SEARCH = ("device", "world_size", "asked_gib", "accumulation_steps", "model", "train")


@dataclass(frozen=True)
class Results:
    """All results of a run, and the problems with files that cannot be used."""

    found: list[Result] = field(default_factory=list)  # sorted by the names of their files
    problems: list[str] = field(default_factory=list)  # a line of text for each file that cannot be used

    def of(self, kind: type[AnyResult]) -> list[AnyResult]:
        """Return the results that are instances of `kind`."""
        return [each for each in self.found if isinstance(each, kind)]


def now() -> str:
    """Return the current time in the format of a result's `date`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def write_result(run: RunDirectory, result: Result) -> Path:
    """Write a result into the run's `results/`, and return its path. An earlier result of the same measurement is
    replaced. Raises RunError or UserError if the file cannot be written."""
    return _write(run, f"{result.name()}.json", _as_json(result.model_dump(mode="json")), "the result")


def write_search(run: RunDirectory, search: dict[str, Any]) -> Path:
    """Write the result of a microbatch search into the run's `results/`, and return its path. An earlier result of the
    same search is replaced. Raises RunError if the file cannot be written."""
    digest = _digest({key: search[key] for key in SAME_SEARCH})
    return _write(run, f"{SEARCH_PREFIX}{digest}.json", _as_json(search), "the result")


def _as_json(values: dict[str, Any]) -> bytes:
    return f"{json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)}\n".encode()


def write_loss(run: RunDirectory, result: LossResult, window_losses: np.ndarray) -> Path:
    """Write a loss result and its windows' losses (fp32, shape [windows]), and return the result's path. Raises
    RunError or UserError if a file cannot be written."""
    losses = save({"losses": window_losses.astype(np.float32)})
    # First, so that no result refers to a missing file
    _write(run, result.windows_name, losses, "the losses of the windows")
    return write_result(run, result)


def _write(run: RunDirectory, name: str, content: bytes, what: str) -> Path:
    path = run.results / check_name(name, "result")
    with os_errors_as(RunError, f"{path}: cannot write {what}"):
        run.results.mkdir(exist_ok=True)
        with atomic_file(path) as draft:  # replaces a link at `path` instead of writing to the link's target
            draft.write_bytes(content)
    return path


def read_results(run: RunDirectory) -> Results:
    """Return all results of a run, except those of microbatch searches. A file that cannot be used is listed in
    `problems`."""
    results = Results()
    for path in sorted(run.results.glob("*.json")):
        if path.name.startswith(SEARCH_PREFIX):
            continue
        try:
            result = _read(path)
            if isinstance(result, LossResult):
                _check_mean(run, result, path)
            results.found.append(result)
        except UserError as error:
            results.problems.append(str(error))
    return results


def _read(path: Path) -> Result:
    with explained(after=f"; {REMEDY}"):
        values = read_json_object(path)
    try:
        return KINDS[str(values.get("kind"))].model_validate(values)
    except (KeyError, ValidationError):
        raise UserError(f"{path}: not a result of this version; {REMEDY}") from None


def _check_mean(run: RunDirectory, result: LossResult, path: Path) -> None:
    """Raise UserError if the loss of a result is not the mean of its windows' losses. A result whose windows' losses
    cannot be read is accepted."""
    try:
        losses = read_window_losses(run, result)
    except UserError:
        return
    mean = float(losses.mean(dtype=np.float64))
    if result.loss is not None and not math.isclose(mean, result.loss, rel_tol=1e-4):
        raise UserError(
            f"{path}: its loss is {result.loss:g}, but the mean of its windows' losses ({result.windows_name}) is "
            f"{mean:g}; {REMEDY}"
        )


def read_window_losses(run: RunDirectory, result: LossResult) -> np.ndarray:
    """Return the loss of each window, fp32 of shape [windows], in nats per token. Raises UserError if the file cannot
    be read or has another number of windows."""
    path = run.results / result.windows_name
    try:
        with safe_open(path, "numpy") as file:
            losses: np.ndarray = file.get_tensor("losses")
    except (OSError, SafetensorError, TypeError, AttributeError, ValueError) as error:  # also dtypes unknown to NumPy
        raise UserError(f"{path}: cannot read the losses of the windows: {error}; measure again") from None
    if losses.shape != (result.text.windows,):
        raise UserError(f"{path}: has losses of shape {list(losses.shape)}, not [{result.text.windows}]; measure again")
    return losses
