"""Results in `results/` of a run's folder, one file for each, written and read through one class for each kind:
measurements of its models after training, and the searches of `-f`.

A file is named after what it measured: a repeated measurement replaces it, and any other is written beside it. Model
and text are identified by hashes of their content, so that a comparison need not trust names.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from harness.common.errors import RunError, UserError
from harness.common.files import atomic_file, check_name
from harness.common.json_files import RecordedCount, read_json_object
from harness.runs.directory import RunDirectory

NAME_CHARACTERS = 12  # of the hash in a file's name
MOVE_AWAY = "or move the file away"

Number = Annotated[float, Field(allow_inf_nan=False)]


class Recorded(BaseModel):
    """Base of all that is written into a result; unknown keys, of later versions, are kept."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


class MeasuredWeights(Recorded):
    """The model that was measured. Two that have the same hash are the same."""

    checkpoint: str  # the name of its folder
    sha256: str  # of model.safetensors
    global_step: RecordedCount | None = None
    tokens_seen: RecordedCount | None = None
    is_best: bool = False  # whether `best` and `latest` led to it when it was measured
    is_latest: bool = False


class Text(Recorded):
    """The text that a loss was measured on: `windows` sequences of `context_length` tokens, one after the other."""

    dataset: str
    sha256: str  # TokenFile.fingerprint() of the split's file
    tokenizer: str  # "gpt2", or the SHA-256 of the tokenizer's file
    split: str
    start_token: RecordedCount
    windows: RecordedCount
    context_length: RecordedCount

    @property
    def content(self) -> tuple[str, str, int, int, int]:
        """Key that equal texts share, whatever data set and split they are called."""
        return self.sha256, self.tokenizer, self.start_token, self.windows, self.context_length


class StoredResult(Recorded):
    """One file of `results/`."""

    same: ClassVar[tuple[str, ...]] = ()  # the keys that say what was measured
    again: ClassVar[str] = "measure again"  # the remedy for a damaged file

    kind: str
    date: str  # ISO 8601, UTC
    device: str
    torch: str

    @classmethod
    def prefix(cls) -> str:
        """Prefix of the file names of this kind."""
        return str(cls.model_fields["kind"].default).replace("_", "-")

    def name(self) -> str:
        """Name of the result's file, without suffix: the same for repeats of a measurement."""
        return f"{self.prefix()}-{_digest(self.model_dump(mode='json', include={*self.same}))}"


class Result(StoredResult):
    """One measurement of one model."""

    weights: MeasuredWeights

    def name(self) -> str:
        values = self.model_dump(mode="json", include={*self.same})
        digest = _digest([self.kind, self.weights.sha256, values])
        return f"{self.prefix()}-{self.weights.checkpoint}-{digest}"


def _digest(values: Any) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:NAME_CHARACTERS]


class LossResult(Result):
    """Result of test_loss.py. The losses of the windows, in order, are in a file beside it."""

    same: ClassVar[tuple[str, ...]] = ("text", "precision")

    kind: str = "test_loss"
    text: Text
    precision: str
    loss: Annotated[Number, Field(ge=0)] | None  # nats per token; None where it is not finite
    bits_per_byte: Annotated[Number, Field(ge=0)] | None = None
    bits_are_exact: bool = True  # by the bytes of the very tokens predicted, not by the whole split's mean

    @model_validator(mode="after")
    def _both_are_nothing_or_none(self) -> LossResult:
        if self.loss and self.bits_per_byte == 0:
            raise ValueError('key "bits_per_byte": 0, but the loss is not')
        return self

    @property
    def windows_name(self) -> str:
        """Name of the file with the losses of the windows."""
        return f"{self.name()}.safetensors"


class BenchmarkScore(Recorded):
    """One metric of a task or group."""

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
    lm_eval: str  # its version
    tasks: list[str]  # as they were asked for
    num_fewshot: RecordedCount | None = None
    limit: RecordedCount | None = None
    precision: str
    scores: list[BenchmarkScore]


class InstructionResult(Result):
    """Scores that a judge gave a model's answers. Only scores of the same judging compare, or of answers judged alone
    by the same judge and prompt."""

    same: ClassVar[tuple[str, ...]] = ("judge", "base_url", "prompt", "questions_sha256", "judging", "repeats")

    kind: str = "instructions"
    judge: str
    base_url: str | None = None
    prompt: str
    questions_sha256: str
    questions: RecordedCount
    repeats: RecordedCount
    judging: str  # a hash of what was judged together: all answers of all models
    judged_with: list[str]  # what that judging calls its models, this one included
    mean: Number | None
    low: Number | None  # 95 % interval
    high: Number | None
    scores: list[Number | None]  # by question; None where the judge gave no valid answer


class TriedMicrobatch(Recorded):
    """A microbatch that fitted, and the peak of the memory of one device with it, on rank 0."""

    microbatch_size: RecordedCount
    gib: Number


class MicrobatchSearch(StoredResult):
    """Result of `-f`: the largest microbatch that fits, and the memory of those tried."""

    same: ClassVar[tuple[str, ...]] = ("device", "world_size", "asked_gib", "accumulation_steps", "model", "train")
    again: ClassVar[str] = "use -f again"

    kind: str = "microbatch_search"
    world_size: RecordedCount
    asked_gib: Number | None = None  # --memory-limit-gib
    limit_gib: Number  # of one device; on the CPU, of one process
    usable_gib: Number  # of it, the most that the peaks may amount to
    largest: RecordedCount  # the answer: sequences in the largest microbatch that fits
    smallest_failed: RecordedCount | None = None
    is_all_data: bool = False  # the data set has no more: larger ones may fit
    tried: list[TriedMicrobatch]  # in the order of the search
    accumulation_steps: RecordedCount
    compiled: bool
    model: dict[str, Any]  # model.json, defaults filled in
    train: dict[str, Any]  # the keys of train.json that memory depends on


KINDS: tuple[type[StoredResult], ...] = (LossResult, BenchmarkResult, InstructionResult, MicrobatchSearch)
AnyResult = TypeVar("AnyResult", bound=Result)
AnyStored = TypeVar("AnyStored", bound=StoredResult)


@dataclass(frozen=True)
class Results:
    """Results in a run's `results/`; `problems` has a line for each file that cannot be read, and `unread` its name."""

    found: list[StoredResult] = field(default_factory=list)  # by the names of their files
    problems: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def of(self, kind: type[AnyStored]) -> list[AnyStored]:
        return [each for each in self.found if isinstance(each, kind)]

    def has_unread(self, kind: type[StoredResult], checkpoint: str = "") -> bool:
        """True if a file that cannot be read is, by its name, of that kind, and of that checkpoint if one is given."""
        beginning = f"{kind.prefix()}-{checkpoint}-" if checkpoint else f"{kind.prefix()}-"
        return any(name.startswith(beginning) for name in self.unread)


def now() -> str:
    """The time for a result's `date`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def write_result(run: RunDirectory, result: StoredResult) -> Path:
    """Write it into the run's `results/`, in place of an earlier measurement of the same. Raises RunError."""
    text = json.dumps(result.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False)
    return _write(run, f"{result.name()}.json", f"{text}\n".encode(), "the result")


def write_loss(run: RunDirectory, result: LossResult, window_losses: np.ndarray) -> Path:
    """Write it with the losses of its windows: those first, so that a result never lacks them. Raises RunError."""
    losses = save({"losses": window_losses.astype(np.float32)})
    _write(run, result.windows_name, losses, "the losses of the windows")
    return write_result(run, result)


def _write(run: RunDirectory, name: str, content: bytes, what: str) -> Path:
    path = run.results / check_name(name, "result")
    try:
        run.results.mkdir(exist_ok=True)
        with atomic_file(path) as draft:  # which takes the place of a link, and never writes where that leads
            draft.write_bytes(content)
    except OSError as error:
        raise RunError(f"{path}: cannot write {what}: {error.strerror}") from None
    return path


def read_results(run: RunDirectory) -> Results:
    """All results of a run; a loss that the losses of its windows contradict is among the problems."""
    results = Results()
    for path in sorted(run.results.glob("*.json")):
        try:
            result = _read(path)
            if isinstance(result, LossResult):
                _check_windows(run, result, path)
            results.found.append(result)
        except UserError as error:
            results.problems.append(str(error))
            results.unread.append(path.name)
    return results


def _read(path: Path) -> StoredResult:
    named = MicrobatchSearch if path.name.startswith(MicrobatchSearch.prefix()) else StoredResult
    try:
        values = read_json_object(path)
    except UserError as error:
        raise UserError(f"{error}; {named.again}, {MOVE_AWAY}") from None
    kinds = {str(kind.model_fields["kind"].default): kind for kind in KINDS}
    try:
        return kinds[str(values.get("kind"))].model_validate(values)
    except (KeyError, ValidationError):
        raise UserError(f"{path}: not a result of this version; {named.again}, {MOVE_AWAY}") from None


def _check_windows(run: RunDirectory, result: LossResult, path: Path) -> None:
    """Raises UserError if the losses of the windows contradict the result. Without them it stands by itself."""
    losses = None
    with suppress(OSError, SafetensorError), safe_open(run.results / result.windows_name, "numpy") as file:
        losses = file.get_tensor("losses")
    if losses is None or losses.shape != (result.text.windows,) or _is_mean(result.loss, losses):
        return
    raise UserError(
        f"{path}: its loss is {result.loss:g}, but the mean of its windows' losses ({result.windows_name}) is "
        f"{losses.mean(dtype=np.float64):g}; measure again, {MOVE_AWAY}"
    )


def _is_mean(loss: float | None, losses: np.ndarray) -> bool:
    return loss is None or math.isclose(float(losses.mean(dtype=np.float64)), loss, rel_tol=1e-4)


def read_window_losses(run: RunDirectory, result: LossResult) -> np.ndarray:
    """The loss of each window, fp32 of shape [windows]. Raises UserError if its file is missing or another's."""
    path = run.results / result.windows_name
    try:
        with safe_open(path, "numpy") as file:
            losses: np.ndarray = file.get_tensor("losses")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot read the losses of the windows: {error}; measure again") from None
    if losses.shape != (result.text.windows,):
        raise UserError(f"{path}: has losses of shape {list(losses.shape)}, not [{result.text.windows}]; measure again")
    if not _is_mean(result.loss, losses):
        raise UserError(f"{path}: has losses whose mean is not {result.loss:.4f}, the one measured; measure again")
    return losses
