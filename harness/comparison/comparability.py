"""Groups of measurements of different runs that may stand in one column: those on equal grounds. Grounds are identified
by content, such as the hash of a text, not by names."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from harness.comparison.records import RunRecord
from harness.runs.checkpoint_meta import validation_text
from harness.runs.metrics import BenchmarkEvent
from harness.runs.results import AnyResult, BenchmarkResult, InstructionResult, LossResult, Result, Text


@dataclass(frozen=True)
class Ground:
    """The text or task that a number was measured on. Numbers compare if their grounds are equal; `words` are for a
    reader, and `further` is what else distinguishes it from a ground of the same words."""

    identity: Hashable
    words: str = field(compare=False)
    further: str = field(default="", compare=False)

    def words_beside(self, others: Iterable[Ground]) -> str:
        """Words that differ from those of the other grounds, as far as `further` can tell them apart."""
        is_alike = any(self != other and self.words == other.words for other in others)
        return f"{self.words}, {self.further}" if is_alike and self.further else self.words


@dataclass(frozen=True)
class Measurement:
    """One number of one run."""

    value: float
    ground: Ground
    remark: str = ""  # what must be known to read it right
    error: str = ""  # how far chance alone may move it, such as "±0.012"


@dataclass(frozen=True)
class Missing:
    """The reason why a run has no number."""

    reason: str


MEASURED_TOO = "; measured, too: "  # in a remark on a result of the best checkpoint, which needs no more words
Measured = Sequence[Measurement] | Missing  # one for each ground


@dataclass(frozen=True)
class Group:
    """Numbers that compare, by the position of their runs."""

    ground: Ground
    members: dict[int, Measurement]


def comparable_groups(measured: Sequence[Measured]) -> list[Group]:
    """The groups of measurements with equal ground, the largest first, then in the order of the runs."""
    groups: dict[Ground, Group] = {}
    for position, of_run in enumerate(measured):
        for measurement in [] if isinstance(of_run, Missing) else of_run:
            group = groups.setdefault(measurement.ground, Group(measurement.ground, {}))
            group.members.setdefault(position, measurement)
    return sorted(groups.values(), key=lambda group: -len(group.members))


def training_ground(record: RunRecord) -> Ground | None:
    """The text that a run's training losses are over; None if its content is not recorded."""
    split, context = record.dataset.get("train"), record.model.get("context_length")
    digest = split.get("sha256") if isinstance(split, dict) else None
    if not isinstance(digest, str):
        return None
    words = f"the train split of {record.dataset.get('name')} ({_short(digest)}), context {context}"
    return Ground(("train", digest, context), words)


def validation_ground(record: RunRecord) -> Ground | None:
    """The text that a run's validation losses are over; None if its content is not recorded."""
    text = validation_text(record.model, record.train, record.dataset)
    if text is None:
        return None
    words = (
        f"{text.sequences:,} x {text.context_length} tokens from {text.start_token:,} of the validation split of "
        f"{record.dataset.get('name')} ({_short(text.sha256)})"
    )
    return Ground(text, words)


def loss_ground(result: LossResult) -> Ground:
    """A test loss compares on the same tokens, cut into the same windows, in the same precision."""
    words = f"{text_words(result.text)}, in {result.precision}"
    tokenizer = f"with another tokenizer ({_short(result.text.tokenizer)})"
    return Ground(("loss", result.text.content, result.precision), words, tokenizer)


def text_words(text: Text) -> str:
    """A slice of text for a reader."""
    return (
        f"{text.windows:,} x {text.context_length} tokens from {text.start_token:,} of the {text.split} split of "
        f"{text.dataset} ({_short(text.sha256)})"
    )


def bits_grounds(results: Sequence[LossResult]) -> list[Ground]:
    """The grounds of bits per byte, one for each result: the same slice, or the same text in other tokens.

    Whether two data sets with different tokenizers are the same text is not recorded. They count as it if both were
    measured from the first token of the split of the same name, and over the same number of bytes but for what does not
    fill a window.
    """
    representatives: list[LossResult] = []
    grounds = []
    for result in results:
        alike = next((each for each in representatives if _same_bytes(each, result)), None)
        if alike is None:
            representatives.append(result)
        first = result if alike is None else alike
        grounds.append(Ground(("bits", loss_ground(first).identity), text_words(first.text)))
    return grounds


def _same_bytes(one: LossResult, other: LossResult) -> bool:
    if loss_ground(one) == loss_ground(other):
        return True
    both = (one, other)
    if one.text.tokenizer == other.text.tokenizer or one.text.split != other.text.split:
        return False
    if one.precision != other.precision or any(each.text.start_token for each in both):
        return False
    sizes = [_bytes(each) for each in both if each.bits_are_exact]
    windows = [_bytes(each) / max(1, each.text.windows) for each in both]
    return len(sizes) == 2 and abs(sizes[0] - sizes[1]) <= max(windows)


def _bytes(result: LossResult) -> float:
    """Bytes of text that a loss was measured on: nats over bits per byte. NaN if that is not known."""
    if not result.bits_per_byte or result.loss is None:
        return math.nan
    tokens = result.text.windows * result.text.context_length
    return result.loss * tokens / math.log(2) / result.bits_per_byte


def judging_ground(result: InstructionResult) -> Ground:
    """Scores compare within one judging, or if each model's answers were judged alone, by the same judge and prompt."""
    together = len(result.judged_with) > 1
    identity = (result.judge, result.base_url, result.prompt, result.questions_sha256, result.repeats)
    words = f"{result.questions} questions ({_short(result.questions_sha256)}), judge {result.judge}"
    if together:
        names = ", ".join(result.judged_with)
        return Ground(("judging", *identity, result.judging), f"{words}, judged together: {names}")
    return Ground(("judging", *identity), f"{words}, each alone")


def benchmark_ground(result: BenchmarkResult) -> Ground:
    """Scores of a task compare with the same number of shots, examples, lm-eval and precision."""
    shots = "the task's own shots" if result.num_fewshot is None else f"{result.num_fewshot} shots"
    examples = "all examples" if result.limit is None else f"the first {result.limit} examples"
    identity = (result.num_fewshot, result.limit, result.lm_eval, result.precision)
    words = f"lm-eval {result.lm_eval}, {shots}, {examples}, in {result.precision}"
    return Ground(("benchmarks", *identity), words)


def training_benchmark_ground(record: RunRecord, event: BenchmarkEvent) -> Ground:
    """Scores that were measured while training compare on as many examples in the same precision, and with no others:
    which lm-eval it was is not recorded."""
    examples = f"{event.examples:,}" if event.examples else "an unknown number of"
    words = f"{examples} examples, in {record.trained_in}, lm-eval's version not recorded"
    return Ground(("benchmarks while training", event.examples or record.name, record.trained_in), words)


def chosen_results(
    record: RunRecord, results: Sequence[AnyResult], grounds: Sequence[Ground]
) -> list[tuple[AnyResult, Ground, str]]:
    """One result of a run for each of the grounds that its results were measured on: the best checkpoint's, else the
    latest's, else the one of the highest step; with a remark where that may surprise. Those of a training that has been
    set aside since are left out."""
    candidates: dict[Ground, list[AnyResult]] = {}
    for result, ground in zip(results, grounds, strict=True):
        if result.weights.checkpoint not in record.checkpoints.aside:
            candidates.setdefault(ground, []).append(result)
    chosen = []
    for ground, those in candidates.items():
        ordered = sorted(those, key=lambda result: _preference(record, result), reverse=True)
        chosen.append((ordered[0], ground, _which(record, ordered)))
    return chosen


def _preference(record: RunRecord, result: Result) -> tuple[bool, bool, int, str]:
    best, latest = record.checkpoints.best, record.checkpoints.latest
    weights = result.weights
    is_best = weights.is_best if best is None else weights.checkpoint == best
    is_latest = weights.is_latest if latest is None else weights.checkpoint == latest
    return is_best, is_latest, weights.global_step or 0, result.date


def _which(record: RunRecord, ordered: Sequence[Result]) -> str:
    """A remark that names the checkpoint of the first result, if it is not the best or not the only one; else ""."""
    first, *others = ordered
    is_best, is_latest, *_ = _preference(record, first)
    kind = "best" if is_best else "latest" if is_latest else "neither best nor latest"
    if is_best and all(other.weights.checkpoint == first.weights.checkpoint for other in others):
        return ""
    remark = f"of checkpoint {first.weights.checkpoint} ({kind})"
    if not is_best:
        best = record.checkpoints.best
        is_unread = best is not None and record.results.has_unread(type(first), best)
        if is_unread:
            return f"{remark}: a result of the best one cannot be read"
        return f"{remark}: the best one has not been measured on this"
    names = sorted({other.weights.checkpoint for other in others} - {first.weights.checkpoint})
    return f"{remark}{MEASURED_TOO}{', '.join(names)}"


def _short(digest: object) -> str:
    return str(digest)[:8]
