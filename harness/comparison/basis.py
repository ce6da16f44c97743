"""The basis of a measurement: the text or task that was measured, identified by hashes of its content instead of names.
Numbers of different runs share a column of the table only if their bases are equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from harness.comparison.inconclusive import Inconclusive
from harness.comparison.records import RunRecord
from harness.runs.checkpoint_meta import validation_text
from harness.runs.metrics import BenchmarkEvent
from harness.runs.results import AnyResult, BenchmarkResult, InstructionResult, LossResult, Result, Text


@dataclass(frozen=True)
class Basis:
    """The text or task that a number was measured on. Bases with equal `identity` are equal; `words` describe the basis
    to a reader."""

    identity: Hashable
    words: str = field(compare=False)


@dataclass(frozen=True)
class Measurement:
    """One number that was measured in one run."""

    value: float
    basis: Basis
    remark: str = ""  # what a reader must know about the number
    error: str = ""  # its uncertainty, such as "±0.012"


MEASURED_TOO = "; measured, too: "  # in a remark on the best checkpoint, before the names of others
Values = Sequence[Measurement] | Inconclusive  # measurements of one run, one per basis, or why there are none
Group = tuple[Basis, dict[int, Measurement]]  # measurements on one basis, by the index of the run


def comparable_groups(values: Sequence[Values]) -> list[Group]:
    """Group the measurements of runs by basis. `values` has one entry per run. The largest group comes first; groups of
    the same size are in the order of the runs."""
    groups: dict[Basis, dict[int, Measurement]] = {}
    for position, of_run in enumerate(values):
        for measurement in [] if isinstance(of_run, Inconclusive) else of_run:
            groups.setdefault(measurement.basis, {}).setdefault(position, measurement)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def training_basis(record: RunRecord) -> Basis | None:
    """Return the basis of a run's training losses: train split and context length. None if the split's hash is not
    recorded."""
    split, context = record.dataset.get("train"), record.model.get("context_length")
    digest = split.get("sha256") if isinstance(split, dict) else None
    if not isinstance(digest, str):
        return None
    words = f"the train split of {record.dataset.get('name')} ({_short(digest)}), context {context}"
    return Basis(("train", digest, context), words)


def validation_basis(record: RunRecord) -> Basis | None:
    """Return the basis of a run's validation losses, or None if their text is not recorded."""
    text = validation_text(record.model, record.train, record.dataset)
    if text is None:
        return None
    words = (
        f"{text.sequences:,} x {text.context_length} tokens from {text.start_token:,} of the validation split of "
        f"{record.dataset.get('name')} ({_short(text.sha256)})"
    )
    return Basis(text, words)


def loss_basis(result: LossResult) -> Basis:
    """Return the basis of a test loss. Test losses have the same basis if the tokens, their division into windows, and
    the precision are the same."""
    tokenizer = result.text.tokenizer
    words = f"{_text_words(result.text)}, in {result.precision}"
    words += "" if tokenizer == "gpt2" else f", tokenizer {_short(tokenizer)}"
    return Basis(("loss", result.text.content, result.precision), words)


def bits_bases(results: Sequence[LossResult]) -> dict[Basis, Basis]:
    """Return the basis of bits per byte for each basis of a test loss. Bits per byte compare on the same slice of
    tokens, and also on the same text in other tokens.

    Results do not record whether two datasets with different tokenizers hold the same text. They count as the same text
    if both were measured in the same precision and from the first token of a split of the same name, and if their
    numbers of bytes differ by at most one window. The last tokens of a split that do not fill a window are not
    measured.
    """
    bases: dict[Basis, Basis] = {}
    representatives: list[LossResult] = []
    for result in results:
        first = next((each for each in representatives if _are_same_bytes(each, result)), result)
        representatives += [result] if first is result else []
        bases[loss_basis(result)] = Basis(("bits", loss_basis(first).identity), _text_words(first.text))
    return bases


def _are_same_bytes(one: LossResult, other: LossResult) -> bool:
    if loss_basis(one) == loss_basis(other):
        return True
    both = (one, other)
    if one.text.tokenizer == other.text.tokenizer or one.text.split != other.text.split:
        return False
    if one.precision != other.precision or any(each.text.start_token for each in both):
        return False
    sizes = []
    for each in both:
        if not (each.bits_are_exact and each.bits_per_byte and each.loss is not None):
            return False
        sizes.append(each.loss * each.text.windows * each.text.context_length / math.log(2) / each.bits_per_byte)
    largest_window = max(size / max(1, each.text.windows) for size, each in zip(sizes, both, strict=True))
    return abs(sizes[0] - sizes[1]) <= largest_window


def _text_words(text: Text) -> str:
    return (
        f"{text.windows:,} x {text.context_length} tokens from {text.start_token:,} of the {text.split} split of "
        f"{text.dataset} ({_short(text.sha256)})"
    )


def judging_basis(result: InstructionResult) -> Basis:
    """Return the basis of an instruction score. Scores compare if the answers were judged together, or if each model's
    answers were judged alone with the same judge, prompt, questions and number of repeats."""
    identity = (result.judge, result.base_url, result.prompt, result.questions_sha256, result.repeats)
    words = f"{result.questions} questions ({_short(result.questions_sha256)}), judge {result.judge}"
    if len(result.judged_with) > 1:
        names = ", ".join(result.judged_with)
        return Basis(("judging", *identity, result.judging), f"{words}, judged together: {names}")
    return Basis(("judging", *identity), f"{words}, each alone")


def benchmark_basis(result: BenchmarkResult) -> Basis:
    """Return the basis of a benchmark's scores: number of shots, examples, version of lm-eval, and precision."""
    shots = "the task's own shots" if result.num_fewshot is None else f"{result.num_fewshot} shots"
    examples = "all examples" if result.limit is None else f"the first {result.limit} examples"
    identity = (result.num_fewshot, result.limit, result.lm_eval, result.precision)
    words = f"lm-eval {result.lm_eval}, {shots}, {examples}, in {result.precision}"
    return Basis(("benchmarks", *identity), words)


def training_benchmark_basis(record: RunRecord, event: BenchmarkEvent) -> Basis:
    """Return the basis of a benchmark score that was evaluated while training. It never equals the basis of a score by
    evaluate_benchmarks.py, because training does not record lm-eval's version."""
    examples = f"{event.examples:,}" if event.examples else "an unknown number of"
    words = f"{examples} examples, in {record.trained_in}, lm-eval's version not recorded"
    return Basis(("benchmarks while training", event.examples or record.name, record.trained_in), words)


def chosen_results(
    record: RunRecord, results: Sequence[AnyResult], basis_of: Callable[[AnyResult], Basis]
) -> list[tuple[AnyResult, Basis, str]]:
    """Return one result of a run for each basis, as (result, basis, remark). The result is that of the best checkpoint,
    or else of the latest, or else of the checkpoint with the highest step. The remark is empty unless a reader should
    know which checkpoint was measured. Leaves out results of an earlier training whose checkpoints were moved to
    aside/."""
    candidates: dict[Basis, list[AnyResult]] = {}
    for result in results:
        if result.weights.checkpoint not in record.aside:
            candidates.setdefault(basis_of(result), []).append(result)
    chosen = []
    for basis, those in candidates.items():
        ordered = sorted(those, key=lambda result: _preference(record, result), reverse=True)
        chosen.append((ordered[0], basis, _which_checkpoint(record, ordered)))
    return chosen


def _preference(record: RunRecord, result: Result) -> tuple[bool, bool, int, str]:
    best, latest, weights = record.best, record.latest, result.weights
    is_best = weights.is_best if best is None else weights.checkpoint == best
    is_latest = weights.is_latest if latest is None else weights.checkpoint == latest
    return is_best, is_latest, weights.global_step or 0, result.date


def _which_checkpoint(record: RunRecord, ordered: Sequence[Result]) -> str:
    """Return a remark that names the checkpoint of the first result, or "" if it is the best and the only one
    measured."""
    first, *others = ordered
    is_best, is_latest, *_ = _preference(record, first)
    further = sorted({other.weights.checkpoint for other in others} - {first.weights.checkpoint})
    if is_best and not further:
        return ""
    kind = "best" if is_best else "latest" if is_latest else "neither best nor latest"
    remark = f"of checkpoint {first.weights.checkpoint} ({kind})"
    if is_best:
        return f"{remark}{MEASURED_TOO}{', '.join(further)}"
    best = record.best
    if best is not None and record.results.has_unread(type(first), best):
        return f"{remark}: a result of the best one cannot be read"
    return f"{remark}: the best one has not been measured on this"


def _short(digest: object) -> str:
    return str(digest)[:8]
