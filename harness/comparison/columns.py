"""Quantities that a comparison shows for each run, one per column, with the reason for each missing number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from harness.comparison.basis import (
    Basis,
    Measurement,
    Values,
    benchmark_basis,
    bits_bases,
    chosen_results,
    judging_basis,
    loss_basis,
    training_basis,
    training_benchmark_basis,
    validation_basis,
)
from harness.comparison.inconclusive import Inconclusive
from harness.comparison.records import RunRecord
from harness.runs.reported import Reported
from harness.runs.results import BenchmarkResult, InstructionResult, LossResult, Result
from harness.runs.throughput import peak_flops

NATS = "nats/token"
MONEY, COUNT = "money", "count"  # number styles: amounts down to fractions of a cent; counts such as 163M
LESS, MORE = True, False  # values of lower_is_better
ANY_BASIS = Basis("any", "")  # of quantities that always compare: tokens, seconds, dollars
SCORES = {"train_loss", "validation_loss", "test_loss", "instruction_score"}  # comparable within one source only
MEASURED_BY = {
    LossResult: "not measured by test_loss.py",
    InstructionResult: "not judged by judge_ift.py",
    BenchmarkResult: "not measured by evaluate_benchmarks.py",
}
UNKNOWN = "not recorded"
DIVERGED = "its test loss is not finite"
# The reason for a missing number, by the key of the quantity. Quantities without an entry have UNKNOWN.
MISSING = {
    **dict.fromkeys(("parameters", "active_parameters"), "model not known"),
    **dict.fromkeys(("train_loss", "validation_loss", "best_validation_loss"), "not recorded, or not finite"),
    "global_batch": "number of ranks not recorded yet",
    "tokens_per_second": "not measured",
    "mfu": "peak of the device not known",
    "peak_memory": "recorded at the end of a run",
}
# The better direction of lm-eval's metrics, as lm-eval registers it, because metrics.jsonl does not record it.
LOWER_IS_BETTER = {
    **dict.fromkeys(("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "acc_all"), MORE),
    **dict.fromkeys(("exact_match", "f1", "mcc", "bleu", "chrf", "likelihood"), MORE),
    **dict.fromkeys(("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "ter", "brier_score"), LESS),
}
Number = float | Inconclusive | None  # None: not recorded


def _basis(key: str, record: RunRecord) -> Basis | None:
    """Return the basis of a number that the run itself recorded, or None if the basis is not recorded."""
    if key in ("validation_loss", "best_validation_loss"):
        return validation_basis(record)
    return training_basis(record) if key == "train_loss" else ANY_BASIS


@dataclass(frozen=True)
class Quantity:
    """The heading of a column and the source of its numbers. `measure` returns a run's own number, or the reason why it
    has none. `report` gives the number that others reported: the name of a figure in reported.json, the name of a
    property of `Reported`, or a function."""

    key: str  # in --sort and --json
    title: str
    unit: str
    style: str  # a format specification, MONEY or COUNT
    measure: Callable[[RunRecord], Number | Values]
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
            return Inconclusive("worked out from numbers that are too large")
        if found is None or isinstance(found, Inconclusive):
            is_new = record.state.word == "never trained"
            return Inconclusive("never trained") if is_new else found or Inconclusive(MISSING.get(self.key, UNKNOWN))
        if not isinstance(found, int | float):
            return found
        basis = _basis(self.key, record)
        if basis is None:
            return Inconclusive(f"{found:.3f}, but its text is not recorded (yet)")
        return [Measurement(found / self.divisor if self.divisor > 1 else found, basis)]

    def reported(self, record: RunRecord) -> Values:
        """Return the number that the run's reported.json gives, or Inconclusive if it gives none."""
        reported, report = record.reported, self.report
        if reported is None:
            return Inconclusive("not reported")
        if isinstance(report, str):
            value = getattr(reported, report, None) or reported.value(report)
        else:
            value = report(reported, record)
        if value is None:
            return Inconclusive("not reported")
        basis = Basis(("reported", reported.source), reported.source) if self.key in SCORES else ANY_BASIS
        return [Measurement(value / self.divisor if self.divisor > 1 else value, basis)]


def quantities(records: Sequence[RunRecord]) -> list[Quantity]:
    """Return all quantities of these runs in the order of their columns: what was trained, the results, then speed,
    time and cost."""
    bases = bits_bases([result for record in records for result in record.results.of(LossResult)])
    bits = partial(_bits_per_byte, bases)
    results = (
        Quantity("test_loss", "test loss", NATS, ".3f", test_losses, "test_loss", LESS),
        Quantity("bits_per_byte", "bits per byte", "", ".3f", bits, "", LESS),
        Quantity("instruction_score", "instruction score", "of 100", ".2f", _scores, "instruction_score", MORE),
    )
    return [*TRAINED, *results, *_benchmarks(records), *SPENT]


# Training


def _active_parameters(record: RunRecord) -> Number:
    """Return the number of parameters that a token passes through; in a dense model, these are all parameters."""
    return record.shape.active_parameters if record.shape else None


def _flops(record: RunRecord, tokens: float | None) -> float | None:
    return record.shape.flops_per_token * tokens if record.shape and tokens else None


def _reported_flops(reported: Reported, record: RunRecord) -> float | None:
    return _flops(record, reported.value("tokens_seen"))


def _train_loss(record: RunRecord) -> Number:
    summary, progress = record.summary, record.progress
    return summary.final_train_loss if summary else progress.train_loss if progress else None


def _validation_loss(record: RunRecord) -> Number:
    """Return the last validation loss, None if it is not recorded, or Inconclusive if validation was off."""
    summary, progress = record.summary, record.progress
    value = summary.final_validation_loss if summary else progress.validation_loss if progress else None
    if value is None and record.train and record.train.get("validation_interval") is None:
        return Inconclusive("trained without validation")
    return value


def _best_loss(record: RunRecord) -> Number:
    last, source = _validation_loss(record), record.summary or record.meta
    if last is None or isinstance(last, Inconclusive):
        return last
    return source.best_loss if source else None


VALIDATION_LOSS = Quantity(
    "validation_loss", "validation loss", NATS, ".3f", _validation_loss, "final_validation_loss", LESS
)
TRAINED = (
    Quantity("parameters", "parameters", "", COUNT, lambda run: run.shape.parameters if run.shape else None),
    Quantity("active_parameters", "active parameters", "", COUNT, _active_parameters),
    Quantity("global_batch", "global batch", "sequences", ",.0f", lambda run: run.global_batch, "global_batch_size"),
    Quantity("tokens", "tokens", "", COUNT, lambda run: run.tokens_seen, "tokens_seen"),
    Quantity("flops", "training FLOPs", "", ".2e", lambda run: _flops(run, run.tokens_seen), _reported_flops),
    Quantity("train_loss", "train loss", NATS, ".3f", _train_loss, "final_train_loss", LESS),
    VALIDATION_LOSS,
    Quantity("best_validation_loss", "best validation loss", NATS, ".3f", _best_loss, "", LESS),
)


def final_validation_losses(record: RunRecord) -> Values:
    """Return the last validation loss for a verdict. It is NaN if a finished run ended with a loss that is not
    finite."""
    found, summary = VALIDATION_LOSS.values(record), record.summary
    is_off = record.train.get("validation_interval") is None
    if summary is None or is_off or "final_validation_loss" not in summary.model_fields_set:
        return found
    basis = validation_basis(record) if summary.final_validation_loss is None else None
    return [Measurement(math.nan, basis)] if basis is not None else found


# Results of the measuring commands, and benchmarks evaluated while training


def _no_result(record: RunRecord, kind: type[Result]) -> Inconclusive:
    if record.results.has_unread(kind):
        return Inconclusive("kept in results/, but the file cannot be read (a remark names it); measure again")
    return Inconclusive(MEASURED_BY[kind])


def all_test_losses(record: RunRecord) -> Values:
    """Return the test losses of a run, one per text. A loss that is not finite is NaN."""
    chosen = chosen_results(record, record.results.of(LossResult), loss_basis)
    measured = [
        Measurement(math.nan if result.loss is None else result.loss, basis, remark) for result, basis, remark in chosen
    ]
    return measured or _no_result(record, LossResult)


def test_losses(record: RunRecord) -> Values:
    """Return the finite test losses of a run, one per text."""
    measured = all_test_losses(record)
    if isinstance(measured, Inconclusive):
        return measured
    return [each for each in measured if math.isfinite(each.value)] or Inconclusive(DIVERGED)


def _bits_per_byte(bases: dict[Basis, Basis], record: RunRecord) -> Values:
    chosen = chosen_results(record, record.results.of(LossResult), lambda result: bases[loss_basis(result)])
    found = []
    for result, basis, remark in chosen:
        approximate = "" if result.bits_are_exact else "by the bytes per token of the whole split"
        if result.bits_per_byte is not None:
            found.append(Measurement(result.bits_per_byte, basis, "; ".join(filter(None, [remark, approximate]))))
    if chosen and not found:
        is_finite = any(result.loss is not None for result, *_ in chosen)
        return Inconclusive("bytes of its test text not known" if is_finite else DIVERGED)
    return found or _no_result(record, LossResult)


def _scores(record: RunRecord) -> Values:
    found = []
    for result, basis, remark in chosen_results(record, record.results.of(InstructionResult), judging_basis):
        interval = "" if None in (result.low, result.high) else f"({result.low:.1f} to {result.high:.1f})"
        if result.mean is not None:
            found.append(Measurement(result.mean, basis, remark, interval))
    return found or _no_result(record, InstructionResult)


def _benchmarks(records: Sequence[RunRecord]) -> list[Quantity]:
    """Return a quantity for each metric of each benchmark by evaluate_benchmarks.py, and another for each metric
    evaluated while training."""
    found: dict[str, Quantity] = {}
    scores = [each for record in records for result in record.results.of(BenchmarkResult) for each in result.scores]
    for each in scores:
        is_lower = None if each.higher_is_better is None else not each.higher_is_better
        key, measure = f"{each.task}_{each.metric}", partial(_benchmark, each.task, each.metric)
        found[key] = Quantity(key, f"{each.task} {each.metric}", "", ".4g", measure, "", is_lower)
    for event in [event for record in records for event in record.benchmarks]:
        is_lower = LOWER_IS_BETTER.get(event.metric.partition(",")[0])
        key, measure = f"{event.task}_{event.metric}_while_training", partial(_in_training, event.task, event.metric)
        title = f"{event.task} {event.metric} while training"
        found[key] = Quantity(key, title, "", ".4g", measure, "", is_lower)
    return list(found.values())


def _benchmark(task: str, metric: str, record: RunRecord) -> Values:
    scores = {
        result.name(): score
        for result in record.results.of(BenchmarkResult)
        for score in reversed(result.scores)
        if (score.task, score.metric) == (task, metric) and score.value is not None
    }
    results = [result for result in record.results.of(BenchmarkResult) if result.name() in scores]
    found = []
    for result, basis, remark in chosen_results(record, results, benchmark_basis):
        score = scores[result.name()]
        found.append(Measurement(score.value or 0.0, basis, remark, _error(score.stderr)))
    return found or _no_result(record, BenchmarkResult)


def _in_training(task: str, metric: str, record: RunRecord) -> Values:
    event = next((each for each in record.benchmarks if (each.task, each.metric) == (task, metric)), None)
    if event is None:
        return Inconclusive("not measured while training")
    if event.value is None:
        return Inconclusive("its score is not finite")
    remark = f"measured while training, after global step {event.global_step:,}"
    return [Measurement(event.value, training_benchmark_basis(record, event), remark, _error(event.stderr))]


def _error(standard_error: float | None) -> str:
    return "" if standard_error is None else f"±{standard_error:.2g}"


# Speed, time and cost


def _speed(record: RunRecord) -> Number:
    source = record.summary or record.progress
    return source.tokens_per_second if source else None


def _mfu(record: RunRecord) -> Number:
    source = record.summary or record.progress
    return None if source is None or source.mfu is None else 100 * source.mfu


def _reported_mfu(reported: Reported, record: RunRecord) -> float | None:
    """Return the MFU in percent, computed from the reported speed: model FLOPs over the devices' peak (PaLM,
    arXiv:2204.02311). None if the speed, the peak or the model is not known."""
    speed, peak = reported.training_speed, peak_flops(reported.device)
    if speed is None or peak is None or record.shape is None:
        return None
    return 100 * speed * record.shape.flops_per_token / (reported.gpus * peak)


def _peak_memory(record: RunRecord) -> Number:
    return record.summary.peak_memory_gib if record.summary else None


def _without_validation(spent: Mapping[str, float]) -> float | None:
    """Return the total seconds or dollars minus those of validation, or None if the phases are not recorded."""
    return spent["total"] - spent.get("validation", 0.0) if {"total", "training"} <= spent.keys() else None


def _dollars(record: RunRecord, *, with_validation: bool = True) -> Number:
    """Return the dollars of the run: those in summary.json, or computed from its seconds and price per hour."""
    if "total" in record.seconds and "total" not in record.dollars:
        return Inconclusive("no price_per_hour in its train.json")
    return record.dollars.get("total") if with_validation else _without_validation(record.dollars)


def _seconds(record: RunRecord, *, with_validation: bool = True) -> Number:
    return record.seconds.get("total") if with_validation else _without_validation(record.seconds)


TIME, COST = "time without validation", "cost without validation"
UNVALIDATED_SECONDS, UNVALIDATED_DOLLARS = "seconds_without_validation", "dollars_without_validation"
UNVALIDATED_TIME, UNVALIDATED_COST = (partial(each, with_validation=False) for each in (_seconds, _dollars))
SPENT = (
    Quantity("tokens_per_second", "training speed", "tokens/s", ",.0f", _speed, "training_speed", MORE),
    Quantity("mfu", "MFU", "%", ".1f", _mfu, _reported_mfu, MORE),
    Quantity("peak_memory", "peak memory", "GiB/device", ".2f", _peak_memory, "", LESS),
    Quantity("hours", "time", "h", ",.3f", _seconds, "train_seconds", LESS, 3600),
    Quantity("hours_without_validation", TIME, "h", ",.3f", UNVALIDATED_TIME, UNVALIDATED_SECONDS, LESS, 3600),
    Quantity("dollars", "cost", "$", MONEY, _dollars, "train_dollars", LESS),
    Quantity("dollars_without_validation", COST, "$", MONEY, UNVALIDATED_COST, UNVALIDATED_DOLLARS, LESS),
)
