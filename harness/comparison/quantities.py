"""Quantities that a comparison shows of each run, such as losses, speed and cost. Numbers can be compared only if they
have the same basis (`Basis`). A missing number has a reason (`Inconclusive`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from harness.common.messages import abbreviated
from harness.common.statistics import Inconclusive
from harness.comparison.records import RunRecord
from harness.runs.checkpoint_meta import tokens_by_source, validation_text
from harness.runs.reported import Reported
from harness.runs.results import (
    MEASURED_BATCH,
    AnyResult,
    BenchmarkResult,
    InstructionResult,
    LossResult,
    MeasuredWeights,
    Result,
)
from harness.runs.throughput import peak_flops

NATS = "nats/token"
MONEY, COUNT = "money", "count"  # number styles: amounts down to fractions of a cent; counts such as 163M
LESS, MORE = True, False  # values of lower_is_better
# Quantities whose reported numbers can be compared only if they are from the same source.
SCORES = {"train_loss", "validation_loss", "test_loss", "instruction_score"}
MEASURED_BY: dict[type[Result], str] = {
    LossResult: "no result of test_loss.py",
    InstructionResult: "no score by judge_ift.py",
    BenchmarkResult: "no such score by evaluate_benchmarks.py",
}
MEASURED_TOO = "; also measured: "  # in remarks, before the names of the other measured checkpoints
UNKNOWN = "not recorded"
# The reason for a missing number, by the key of the quantity. Quantities without an entry have UNKNOWN.
MISSING = {
    **dict.fromkeys(("parameters", "active_parameters"), "model not known"),
    **dict.fromkeys(("train_loss", "validation_loss", "best_validation_loss"), "not recorded, or not finite"),
    "global_batch": "ranks, microbatch_size or accumulation steps not recorded",
    "tokens_per_second": "not measured",
    "mfu": "speed or peak FLOP/s of the device not known",
    "peak_memory": "recorded only by the process that trains a run to its end",
}
DIVERGED = "its test loss is not finite"
# Whether a lower value of a metric is better, as registered in lm-eval. metrics.jsonl does not record this.
LOWER_IS_BETTER = {
    **dict.fromkeys(("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "acc_all"), MORE),
    **dict.fromkeys(("exact_match", "f1", "mcc", "bleu", "chrf", "likelihood"), MORE),
    **dict.fromkeys(("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "ter", "brier_score"), LESS),
}


@dataclass(frozen=True)
class Basis:
    """The text or task that a number was measured on. Bases with equal `identity` are equal; `words` are for a
    reader."""

    identity: Hashable
    words: str = field(compare=False)


ANY_BASIS = Basis("any", "")  # of quantities that can always be compared: tokens, seconds, dollars


@dataclass(frozen=True)
class Measurement:
    """One number of one run, measured here or reported by others."""

    value: float
    basis: Basis
    remark: str = ""  # what a reader must know about the number
    error: str = ""  # its uncertainty, such as "±0.012"
    result: Result | None = None  # the result that the number is from


Number = float | Inconclusive | None  # None: not recorded
Values = Sequence[Measurement] | Inconclusive  # measurements of one run, one per basis, or why there are none
ByBasis = dict[Basis, dict[int, Measurement]]  # measurements of several runs, by basis and by the index of the run


def by_basis(values: Sequence[Values]) -> ByBasis:
    """Return the measurements by basis, and by the run's index in `values`. The most common basis comes first. Of bases
    with equally many runs, the one whose first result has the most tokens, questions or examples comes first."""
    found: ByBasis = {}
    for index, of_run in enumerate(values):
        for measurement in [] if isinstance(of_run, Inconclusive) else of_run:
            found.setdefault(measurement.basis, {}).setdefault(index, measurement)

    def size(measured: dict[int, Measurement]) -> float:
        result = next(iter(measured.values())).result
        if isinstance(result, LossResult):
            return result.text.windows * result.text.context_length
        if isinstance(result, InstructionResult):
            return sum(score is not None for score in result.scores)
        return (result.limit or math.inf) if isinstance(result, BenchmarkResult) else 0

    return dict(sorted(found.items(), key=lambda item: (len(item[1]), size(item[1])), reverse=True))


@dataclass(frozen=True)
class Quantity:
    """Heading of a column, and source of its numbers."""

    key: str  # in --sort and --json
    title: str
    unit: str
    style: str  # a format specification, MONEY or COUNT
    measure: Callable[[RunRecord], Number | Values]  # the run's own number or measurements, or why it has none
    # The number that others reported: the name of a figure in reported.json, the name of a property of `Reported`, or a
    # function. "" if others report no such number.
    report: str | Callable[[Reported, RunRecord], float | None] = ""
    lower_is_better: bool | None = None
    divisor: int = 1  # turns measured and reported numbers into the column's unit

    def values(self, record: RunRecord) -> Values:
        """Return the run's measurements, or the reason why it has none."""
        try:
            found = self.measure(record)
            if isinstance(found, int | float) and not math.isfinite(found):
                raise OverflowError
        except OverflowError:
            return Inconclusive("computed from numbers so large that the result is not finite")
        if found is None or isinstance(found, Inconclusive):
            word = record.state.word
            if word == "never trained":
                return Inconclusive(word)
            return found or Inconclusive(word if word == "not trained here" else MISSING.get(self.key, UNKNOWN))
        if not isinstance(found, int | float):
            return found
        basis = BASES.get(self.key, lambda _: ANY_BASIS)(record)
        if basis is None:
            return Inconclusive(f"{found:.3f}, but the text that it was measured on is not recorded (yet)")
        return [Measurement(found / self.divisor if self.divisor > 1 else found, basis)]

    def reported(self, record: RunRecord) -> Values:
        """Return a list with the number that others reported (reported.json), or Inconclusive if there is none."""
        reported, report, value = record.reported, self.report, None
        if reported is not None and isinstance(report, str):
            value = getattr(reported, report, None) or reported.value(report)
        elif reported is not None and not isinstance(report, str):
            value = report(reported, record)
        if reported is None or value is None:
            return Inconclusive("not reported")
        basis = Basis(("reported", reported.source), reported.source) if self.key in SCORES else ANY_BASIS
        return [Measurement(value / self.divisor if self.divisor > 1 else value, basis)]


def quantities(records: Sequence[RunRecord]) -> list[Quantity]:
    """Return the quantities to show for these runs, in the order of their columns."""
    bits = partial(_bits_per_byte, bits_bases([result for each in records for result in each.results.of(LossResult)]))
    benchmarks: dict[str, Quantity] = {}

    def add(task: str, metric: str, when: str, lower_is_better: bool | None) -> None:
        key, title = f"{task}_{metric}{when.replace(' ', '_')}", f"{task} {metric}{when}"
        measure = partial(_benchmark_while_training if when else _benchmark, task, metric)
        benchmarks[key] = Quantity(key, title, "", ".4g", measure, "", lower_is_better)

    for each in [each for record in records for result in record.results.of(BenchmarkResult) for each in result.scores]:
        add(each.task, each.metric, "", None if each.higher_is_better is None else not each.higher_is_better)
    for event in [event for record in records for event in record.benchmarks]:
        add(event.task, event.metric, " while training", LOWER_IS_BETTER.get(event.metric.partition(",")[0]))
    repeats = any(record.train.get("epochs") is not None or "sources" in record.dataset for record in records)
    return [
        *TRAINED,
        *([Quantity("epochs", "epochs", "", ",.2f", _epochs)] if repeats else []),
        Quantity("test_loss", "test loss", NATS, ".3f", _finite_test_losses, "test_loss", LESS),
        *([TRAINED_ON] if any(record.results.of(LossResult) for record in records) else []),
        Quantity("bits_per_byte", "bits per byte", "", ".3f", bits, "", LESS),
        Quantity("instruction_score", "instruction score", "of 100", ".2f", _scores, "instruction_score", MORE),
        *benchmarks.values(),
        *SPENT,
    ]


# Training


def training_basis(record: RunRecord) -> Basis | None:
    """Return the basis of a run's training losses (its train split and context length), or None if the split's hash is
    not recorded."""
    split, context = record.dataset.get("train"), record.model.get("context_length")
    digest = split.get("sha256") if isinstance(split, dict) else None
    if not isinstance(digest, str):
        return None
    words = f"the train split of {record.dataset.get('name')} ({digest[:8]}), context {context}"
    return Basis(("train", digest, context), words)


def validation_basis(record: RunRecord) -> Basis | None:
    """Return the basis of a run's validation losses (the text that they are measured on), or None if that text is not
    recorded."""
    text, name = validation_text(record.model, record.train, record.dataset), record.dataset.get("name")
    if text is None:
        return None
    return Basis(text, _slice(text.sequences, text.context_length, text.start_token, "validation", name, text.sha256))


def _slice(windows: int, context: int, start: int, split: str, dataset: object, digest: str) -> str:
    return f"{windows:,} x {context} tokens from token {start:,} of the {split} split of {dataset} ({digest[:8]})"


def _latest(in_summary: str, in_report: str, record: RunRecord) -> Number:
    """Return the summary's field `in_summary` or, if the record has no summary, the field `in_report` of the run's last
    report. Returns None if there is no such field."""
    report = record.progress.train if record.progress else None
    source, key = (record.summary, in_summary) if record.summary else (report, in_report)
    number: Number = getattr(source, key, None)
    return number


def _validation_loss(record: RunRecord) -> Number:
    """Return the last validation loss. Without one, return Inconclusive for a run without validation, else None."""
    summary, progress = record.summary, record.progress
    value = summary.final_validation_loss if summary else progress.validation.loss if progress else None
    is_off = record.train and record.train.get("validation_interval") is None
    return Inconclusive("trained without validation") if value is None and is_off else value


def _best_loss(record: RunRecord) -> Number:
    last = _validation_loss(record)
    return last if last is None or isinstance(last, Inconclusive) else record.recorded("best_loss")


def final_validation_losses(record: RunRecord) -> Values:
    """Return the run's last validation loss as one measurement, or the reason why there is none. A finished run's
    loss that is not finite is returned as NaN."""
    summary, basis = record.summary, validation_basis(record)
    is_validated = record.train.get("validation_interval") is not None
    if is_validated and basis is not None and summary is not None and summary.final_validation_loss is None:
        return [Measurement(math.nan, basis)]  # so that a verdict takes the run into account
    return VALIDATION_LOSS.values(record)


def _flops(record: RunRecord, tokens: float | None) -> float | None:
    return record.shape.flops_per_token * tokens if record.shape and tokens else None


def _reported_flops(reported: Reported, record: RunRecord) -> float | None:
    return _flops(record, reported.value("tokens_seen"))


def _epochs(record: RunRecord) -> Number:
    """Return the number of passes over the train split; for a mixture of datasets, the largest number of passes over
    one of their train splits."""
    found = tokens_by_source(record.model, record.train, record.dataset, record.tokens_seen or 0)
    return max((seen / once for seen, once in found.values() if seen), default=None)


# Results of the measuring commands, and benchmarks evaluated while training


def loss_basis(result: LossResult) -> Basis:
    """Return the basis of a test loss: the split's tokens (by `TokenFile.fingerprint`), the tokenizer, the measured
    windows of the split, and the precision."""
    tokenizer = result.text.tokenizer
    words = f"{_text_words(result)}, in {result.precision}"
    words += "" if tokenizer == "gpt2" else f", tokenizer {tokenizer[:8]}"
    return Basis(("loss", result.text.content, result.precision), words)


def _text_words(result: LossResult) -> str:
    text = result.text
    return _slice(text.windows, text.context_length, text.start_token, text.split, text.dataset, text.sha256)


def bits_bases(results: Sequence[LossResult]) -> dict[Basis, Basis]:
    """Map the basis of each result's test loss to the basis of its bits per byte. Bits per byte of the same text can be
    compared even if the tokenizers differ.

    Two results with different tokenizers count as measured on the same text if all of this holds:

    - The names of the splits are equal, and so are the precisions.
    - Both texts begin at the first token of their split.
    - The numbers of bytes are known exactly, and differ by at most the bytes of MEASURED_BATCH sequences.
    """
    bases: dict[Basis, Basis] = {}
    firsts: list[tuple[LossResult, float | None, float]] = []  # result, bytes if known exactly, bytes of a window
    # Results do not record whether texts of different tokenizers are the same.
    for result in results:
        text, size = result.text, None
        if result.bits_are_exact and result.bits_per_byte and result.loss is not None and not text.start_token:
            size = result.loss * text.windows * text.context_length / math.log(2) / result.bits_per_byte
        window = (size or 0.0) / max(1, text.windows)
        for first, other_size, other_window in firsts:
            if loss_basis(first) == loss_basis(result):
                break
            is_retokenized = first.text.tokenizer != text.tokenizer and first.text.split == text.split
            is_alike = is_retokenized and first.precision == result.precision
            # The last tokens of a split are not measured if they do not fill a batch.
            batch = MEASURED_BATCH * max(window, other_window)
            if is_alike and size and other_size and abs(size - other_size) <= batch:
                break
        else:
            first = result
            firsts.append((result, size, window))
        bases[loss_basis(result)] = Basis(("bits", loss_basis(first).identity), _text_words(first))
    return bases


def _measurements(
    record: RunRecord,
    kind: type[AnyResult],
    basis_of: Callable[[AnyResult], Basis],
    read: Callable[[AnyResult], tuple[float | None, str] | None],
) -> Values:
    """Return a run's measurements from its results of the class `kind`, at most one for each basis, or the reason why
    there are none. `read` returns a result's number (None: not known) and uncertainty, or None for a result that does
    not count. If the number of the chosen result is not known, its basis has no measurement.

    - The result of the best checkpoint is used, else of the latest.
    - If neither was measured, the result of the highest step is used, unless the run has finished.
    - Of several results of one checkpoint, the newest is used.
    - Results of checkpoints in aside/ do not count.
    """
    best_step = record.summary.best_step if record.summary else None
    steps = record.summary.global_steps if record.summary else None
    # Checkpoints that were copied here before the run's end do not have its best and latest weights.
    is_old = steps is not None and record.latest is not None and not record.latest.endswith(f"-iteration-{steps - 1}")

    def is_at(weights: MeasuredWeights, link: str | None, step: int | None, *, recorded: bool) -> bool:
        """Return True if `weights` are those of the checkpoint `link`. If `link` is None or `is_old` is true,
        their global step is compared with `step`; if one of the two is unknown, `recorded` is returned."""
        if link is not None and not is_old:
            return weights.checkpoint == link
        return recorded if step is None or weights.global_step is None else weights.global_step == step

    def preference(result: Result) -> tuple[bool, bool, int, str]:
        weights = result.weights
        is_best = is_at(weights, record.best, best_step, recorded=weights.is_best)
        is_latest = is_at(weights, record.latest, steps and steps - 1, recorded=weights.is_latest)
        return is_best, is_latest, weights.global_step or 0, result.date

    candidates: dict[Basis, list[AnyResult]] = {}
    for result in record.results.of(kind):
        if result.weights.checkpoint not in record.aside and read(result) is not None:
            candidates.setdefault(basis_of(result), []).append(result)
    found, early = [], []
    for basis, results in candidates.items():
        first, *others = sorted(results, key=preference, reverse=True)
        is_best, is_latest, *_ = preference(first)
        own = first.weights.checkpoint
        if record.state.word == "finished" and not is_best and not is_latest:
            early.append(own)  # the number would not be that of the run's end
            continue
        further = sorted({other.weights.checkpoint for other in others} - {own})
        which = "best" if is_best else "latest" if is_latest else "neither best nor latest"
        remark = f"of checkpoint {own} ({which})"
        if is_best:
            remark = f"{remark}{MEASURED_TOO}{', '.join(further)}" if further else ""
        else:
            remark += ": the best checkpoint has no comparable result"
        value, error = read(first) or (None, "")
        if value is not None:
            found.append(Measurement(value, basis, remark, error, first))
    those = abbreviated([*dict.fromkeys(early)])
    before_end = f"measured only at {those}, before the run's end; measure its best checkpoint, too"
    return found or Inconclusive(before_end if early else MEASURED_BY[kind])


def all_test_losses(record: RunRecord) -> Values:
    """Return the test losses of a run, at most one for each `loss_basis` (text and precision), or the reason why there
    are none. A loss that is not finite is NaN."""
    return _measurements(
        record, LossResult, loss_basis, lambda result: (math.nan if result.loss is None else result.loss, "")
    )


def _finite_test_losses(record: RunRecord) -> Values:
    measured = all_test_losses(record)
    if isinstance(measured, Inconclusive):
        return measured
    return [each for each in measured if math.isfinite(each.value)] or Inconclusive(DIVERGED)


def _trained_on(record: RunRecord) -> Values:
    """Return, for each measured split for which it is known, the percentage of the compared 13-grams that also occur in
    the run's training data; or the reason why it is not known for any."""

    def read(result: LossResult) -> tuple[float | None, str] | None:
        found = result.trained_on
        return None if found is None or not found.ngrams else (100 * found.share, "")

    def basis(result: LossResult) -> Basis:
        text = result.text
        return Basis(("trained on", text.sha256), f"the {text.split} split of {text.dataset} ({text.sha256[:8]})")

    found, losses = _measurements(record, LossResult, basis, read), all_test_losses(record)
    if isinstance(losses, Inconclusive):
        return losses
    if isinstance(found, Inconclusive):
        return Inconclusive("not known; test_loss.py prints the percentage, or why it is not known")
    return found


def _bits_per_byte(bases: Mapping[Basis, Basis], record: RunRecord) -> Values:
    found = _measurements(
        record, LossResult, lambda result: bases[loss_basis(result)], lambda result: (result.bits_per_byte, "")
    )
    if isinstance(found, Inconclusive):  # there is no test loss, or only one without bits per byte
        losses = _finite_test_losses(record)
        return (
            losses if isinstance(losses, Inconclusive) else Inconclusive("number of bytes of its test text not known")
        )
    bits = []
    for each in found:
        is_exact = isinstance(each.result, LossResult) and each.result.bits_are_exact
        remarks = [each.remark, "" if is_exact else "computed with the mean bytes per token of the whole split"]
        bits.append(replace(each, remark="; ".join(filter(None, remarks))))
    return bits


def judging_basis(result: InstructionResult) -> Basis:
    """Return the basis of an instruction score: the judge, its URL, the prompt, the questions, those without a score,
    and the number of repeats. Scores of models that were judged together have a basis of their own."""
    missing = tuple(number for number, score in enumerate(result.scores, start=1) if score is None)
    identity = (result.judge, result.base_url, result.prompt, result.questions_sha256, missing, result.repeats)
    some = f" without a score for {abbreviated([str(number) for number in missing])}" if missing else ""
    words = f"{result.questions} questions ({result.questions_sha256[:8]}){some}, judge {result.judge}"
    if len(result.judged_with) > 1:
        names = ", ".join(result.judged_with)
        return Basis(("judging", *identity, result.judging), f"{words}, judged together: {names}")
    return Basis(("judging", *identity), f"{words}, each model judged alone")


def _scores(record: RunRecord) -> Values:
    def read(result: InstructionResult) -> tuple[float | None, str]:
        return result.mean, "" if None in (result.low, result.high) else f"({result.low:.1f} to {result.high:.1f})"

    return _measurements(record, InstructionResult, judging_basis, read)


def benchmark_basis(result: BenchmarkResult) -> Basis:
    """Return the basis of the scores in a result: numbers of shots and examples, lm-eval's version, and precision."""
    shots = "the task's own shots" if result.num_fewshot is None else f"{result.num_fewshot} shots"
    examples = "all examples" if result.limit is None else f"the first {result.limit} examples"
    identity = (result.num_fewshot, result.limit, result.lm_eval, result.precision)
    words = f"lm-eval {result.lm_eval}, {shots}, {examples}, in {result.precision}"
    return Basis(("benchmarks", *identity), words)


def _benchmark(task: str, metric: str, record: RunRecord) -> Values:
    def read(result: BenchmarkResult) -> tuple[float | None, str] | None:
        scores = (each for each in result.scores if (each.task, each.metric) == (task, metric))
        return next(((each.value, _error(each.stderr)) for each in scores if each.value is not None), None)

    return _measurements(record, BenchmarkResult, benchmark_basis, read)


def _benchmark_while_training(task: str, metric: str, record: RunRecord) -> Values:
    """Return the benchmark score of the last evaluation while training, or the reason why there is none."""
    event = next((each for each in record.benchmarks if (each.task, each.metric) == (task, metric)), None)
    if event is None or event.value is None:
        return Inconclusive("not measured while training" if event is None else "its score is not finite")
    examples = f"{event.examples:,}" if event.examples else "an unknown number of"
    asked = record.train.get("precision")
    precision = record.recorded("precision") or (None if asked == "auto" else asked)
    words = f"{examples} examples, in {precision or 'a precision not recorded'}, lm-eval's version not recorded"
    # Training does not record lm-eval's version, so the basis differs from that of evaluate_benchmarks.py. If the
    # number of examples or the precision is not known, the basis is the run's own.
    basis = Basis(("benchmarks while training", event.examples or record.name, precision or record.name), words)
    remark = f"measured while training, after global step {event.global_step:,}"
    return [Measurement(event.value, basis, remark, _error(event.stderr))]


def _error(standard_error: float | None) -> str:
    return "" if standard_error is None else f"±{standard_error:.2g}"


# Speed, time and cost


def _mfu(record: RunRecord) -> Number:
    mfu = _latest("mfu", "mfu", record)
    return 100 * mfu if isinstance(mfu, float | int) else None


def _reported_mfu(reported: Reported, record: RunRecord) -> float | None:
    """Return the MFU in percent, computed from the reported speed: model FLOPs over the devices' peak (PaLM,
    arXiv:2204.02311)."""
    speed, peak = reported.training_speed, peak_flops(reported.device)
    if speed is None or peak is None or record.shape is None:
        return None
    return 100 * speed * record.shape.flops_per_token / (reported.gpus * peak)


def _spent(what: Literal["seconds", "dollars"], without: str, record: RunRecord) -> Number:
    """Return the total seconds or dollars (`what`) of a run, minus those of the phase `without` if a phase is given."""
    spent: Mapping[str, float] = getattr(record, what)
    if what == "dollars" and "total" in record.seconds and "total" not in spent:
        return Inconclusive("train.json had no price_per_hour")
    if not without:
        return spent.get("total")
    return spent["total"] - spent.get(without, 0.0) if {"total", "training"} <= spent.keys() else None


# The function that returns the basis of a number that the run itself recorded, by the key of the quantity. Recorded
# numbers of other quantities, such as seconds, can always be compared.
BASES = {"train_loss": training_basis, **dict.fromkeys(("validation_loss", "best_validation_loss"), validation_basis)}
_train_loss = partial(_latest, "final_train_loss", "loss")
_speed = partial(_latest, "tokens_per_second", "tokens_per_second")
_seconds, _dollars = (partial(_spent, what, "") for what in ("seconds", "dollars"))
_training_seconds, _training_dollars = (partial(_spent, what, "validation") for what in ("seconds", "dollars"))
VALIDATION_LOSS = Quantity(
    "validation_loss", "validation loss", NATS, ".3f", _validation_loss, "final_validation_loss", LESS
)
TRAINED_ON = Quantity("test_text_trained_on", "test text in the training data", "%", ".1f", _trained_on)
TRAINED = (
    Quantity("parameters", "parameters", "", COUNT, lambda run: run.shape.parameters if run.shape else None),
    Quantity(
        "active_parameters",
        "active parameters",
        "",
        COUNT,
        lambda run: run.shape.active_parameters if run.shape else None,
    ),
    Quantity("global_batch", "global batch", "sequences", ",.0f", lambda run: run.global_batch, "global_batch_size"),
    Quantity("tokens", "tokens", "", COUNT, lambda run: run.tokens_seen, "tokens_seen"),
    Quantity("flops", "training FLOPs", "", ".2e", lambda run: _flops(run, run.tokens_seen), _reported_flops),
    Quantity("train_loss", "train loss", NATS, ".3f", _train_loss, "final_train_loss", LESS),
    VALIDATION_LOSS,
    Quantity("best_validation_loss", "best validation loss", NATS, ".3f", _best_loss, "", LESS),
)
TIME, COST = "time without validation", "cost without validation"
TRAINING_SECONDS, TRAINING_DOLLARS = "seconds_without_validation", "dollars_without_validation"
SPENT = (
    Quantity("tokens_per_second", "training speed", "tokens/s", ",.0f", _speed, "training_speed", MORE),
    Quantity("mfu", "MFU", "%", ".1f", _mfu, _reported_mfu, MORE),
    Quantity("peak_memory", "peak memory", "GiB/device", ".2f", partial(_latest, "peak_memory_gib", ""), "", LESS),
    Quantity("hours", "time", "h", ",.3f", _seconds, "train_seconds", LESS, 3600),
    Quantity("hours_without_validation", TIME, "h", ",.3f", _training_seconds, TRAINING_SECONDS, LESS, 3600),
    Quantity("dollars", "cost", "$", MONEY, _dollars, "train_dollars", LESS),
    Quantity("dollars_without_validation", COST, "$", MONEY, _training_dollars, TRAINING_DOLLARS, LESS),
)
