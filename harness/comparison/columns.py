"""The numbers that a comparison tells of each run: one function for each column, and the reason for a missing one."""

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
MONEY, COUNT = "money", "count"  # styles of amounts that may be a fraction of a cent, and of counts such as 163M
LESS, MORE = True, False  # values of lower_is_better
ANY_BASIS = Basis("any", "")  # of what needs no common basis: tokens, seconds, dollars
SCORES = {"train_loss", "validation_loss", "test_loss", "instruction_score"}  # by different sources they do not compare
MEASURED_BY = {
    LossResult: "not measured by test_loss.py",
    InstructionResult: "not judged by judge_ift.py",
    BenchmarkResult: "not measured by evaluate_benchmarks.py",
}
DIVERGED = "its test loss is not finite"
NO_LOSS = Inconclusive("not recorded, or not finite")
# lm-eval's metrics, as it registers them; lines of metrics.jsonl do not record the direction.
LOWER_IS_BETTER = {
    **dict.fromkeys(("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "acc_all"), MORE),
    **dict.fromkeys(("exact_match", "f1", "mcc", "bleu", "chrf", "likelihood"), MORE),
    **dict.fromkeys(("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "ter", "brier_score"), LESS),
}
Number = float | Inconclusive | None  # None: not recorded


def _any_basis(_: RunRecord) -> Basis | None:
    return ANY_BASIS


@dataclass(frozen=True)
class Quantity:
    """A column's heading and source: `measure` gives a run's own number, or the reason for none; `report` the one that
    others reported, as a figure's name or a function."""

    key: str  # in --sort and --json
    title: str
    unit: str
    style: str  # of format(), MONEY or COUNT
    measure: Callable[[RunRecord], Number | Values]
    report: str | Callable[[Reported, RunRecord], float | None] = ""
    lower_is_better: bool | None = None
    basis: Callable[[RunRecord], Basis | None] = _any_basis

    def values(self, record: RunRecord) -> Values:
        """The run's measurements, or the reason for none."""
        try:
            found = self.measure(record)
            is_finite = not isinstance(found, int | float) or math.isfinite(found)
        except OverflowError:
            is_finite = False
        if not is_finite:
            return Inconclusive("worked out from numbers that are too large")
        if found is None or isinstance(found, Inconclusive):
            is_new = record.state.word == "never trained"
            return Inconclusive("never trained") if is_new else found or Inconclusive("not recorded")
        if not isinstance(found, int | float):
            return found
        basis = self.basis(record)
        if basis is None:
            return Inconclusive(f"{found:.3f}, but the text that it was measured on is not recorded, or not yet")
        return [Measurement(found, basis)]

    def reported(self, record: RunRecord) -> Values:
        """The figure that somebody reported of the run."""
        value, reported = None, record.reported
        if reported is not None and self.report:
            value = reported.value(self.report) if isinstance(self.report, str) else self.report(reported, record)
        if reported is None or value is None:
            return Inconclusive("not reported")
        basis = Basis(("reported", reported.source), reported.source) if self.key in SCORES else ANY_BASIS
        return [Measurement(value, basis)]


def quantities(records: Sequence[RunRecord]) -> list[Quantity]:
    """All quantities of these runs, in the order of columns: what was trained, the results, and what was spent."""
    bases = bits_bases([result for record in records for result in record.results.of(LossResult)])
    bits = partial(_bits_per_byte, bases)
    results = (
        Quantity("test_loss", "test loss", NATS, ".3f", test_losses, "test_loss", LESS),
        Quantity("bits_per_byte", "bits per byte", "", ".3f", bits, "", LESS),
        INSTRUCTION_SCORE,
    )
    return [*TRAINED, *results, *_benchmarks(records), *SPENT]


# Training


def _parameters(record: RunRecord) -> Number:
    return record.shape.parameters if record.shape else Inconclusive("model not known")


def _active_parameters(record: RunRecord) -> Number:
    """Parameters that a token goes through; all of a dense model's."""
    return record.shape.active_parameters if record.shape else Inconclusive("model not known")


def _global_batch(record: RunRecord) -> Number:
    return record.global_batch or Inconclusive("number of ranks not recorded yet")


def _tokens(record: RunRecord) -> Number:
    return record.tokens_seen


def _flops(record: RunRecord) -> Number:
    shape, tokens = record.shape, record.tokens_seen
    return shape.flops_per_token * tokens if shape and tokens else None


def _reported_flops(reported: Reported, record: RunRecord) -> float | None:
    tokens = reported.value("tokens_seen")
    return record.shape.flops_per_token * tokens if record.shape and tokens else None


def _train_loss(record: RunRecord) -> Number:
    summary, progress = record.summary, record.progress
    loss = summary.final_train_loss if summary else progress.train_loss if progress else None
    return NO_LOSS if loss is None else loss


def _validation_loss(record: RunRecord) -> Number:
    """The last validation loss."""
    summary, progress = record.summary, record.progress
    value = summary.final_validation_loss if summary else progress.validation_loss if progress else None
    if value is None and record.train and record.train.get("validation_interval") is None:
        return Inconclusive("trained without validation")
    return NO_LOSS if value is None else value


def _best_loss(record: RunRecord) -> Number:
    last = _validation_loss(record)
    if isinstance(last, Inconclusive):
        return last
    source = record.summary or record.meta
    best = source.best_loss if source else None
    return NO_LOSS if best is None else best


VALIDATION_LOSS = Quantity(
    "validation_loss", "validation loss", NATS, ".3f", _validation_loss, "final_validation_loss", LESS, validation_basis
)
TRAINED = (
    Quantity("parameters", "parameters", "", COUNT, _parameters),
    Quantity("active_parameters", "active parameters", "", COUNT, _active_parameters),
    Quantity("global_batch", "global batch", "sequences", ",.0f", _global_batch, "global_batch_size"),
    Quantity("tokens", "tokens", "", COUNT, _tokens, "tokens_seen"),
    Quantity("flops", "training FLOPs", "", ".2e", _flops, _reported_flops),
    Quantity("train_loss", "train loss", NATS, ".3f", _train_loss, "final_train_loss", LESS, training_basis),
    VALIDATION_LOSS,
    Quantity("best_validation_loss", "best validation loss", NATS, ".3f", _best_loss, "", LESS, validation_basis),
)


def final_validation_losses(record: RunRecord) -> Values:
    """The validation loss for a verdict: NaN for one of a finished run that is not finite."""
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


def all_test_losses(record: RunRecord) -> list[Measurement]:
    """Test losses of a run, one for each text, NaN for a loss that is not finite."""
    chosen = chosen_results(record, record.results.of(LossResult), loss_basis)
    return [
        Measurement(math.nan if result.loss is None else result.loss, basis, remark) for result, basis, remark in chosen
    ]


def test_losses(record: RunRecord) -> Values:
    """Test losses of a run that are finite, one for each text."""
    measured = all_test_losses(record)
    found = [each for each in measured if math.isfinite(each.value)]
    return found or (Inconclusive(DIVERGED) if measured else _no_result(record, LossResult))


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


def _instruction_scores(record: RunRecord) -> Values:
    found = []
    for result, basis, remark in chosen_results(record, record.results.of(InstructionResult), judging_basis):
        interval = "" if None in (result.low, result.high) else f"({result.low:.1f} to {result.high:.1f})"
        if result.mean is not None:
            found.append(Measurement(result.mean, basis, remark, interval))
    return found or _no_result(record, InstructionResult)


def _benchmarks(records: Sequence[RunRecord]) -> list[Quantity]:
    """A quantity for each metric of each benchmark: by evaluate_benchmarks.py, and by evaluation while training."""
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
        error = "" if score.stderr is None else f"±{score.stderr:.2g}"
        found.append(Measurement(score.value or 0.0, basis, remark, error))
    return found or _no_result(record, BenchmarkResult)


def _in_training(task: str, metric: str, record: RunRecord) -> Values:
    event = next((each for each in record.benchmarks if (each.task, each.metric) == (task, metric)), None)
    if event is None:
        return Inconclusive("not measured while training")
    if event.value is None:
        return Inconclusive("its score is not finite")
    remark = f"measured while training, after global step {event.global_step:,}"
    error = "" if event.stderr is None else f"±{event.stderr:.2g}"
    return [Measurement(event.value, training_benchmark_basis(record, event), remark, error)]


INSTRUCTION_SCORE = Quantity(
    "instruction_score", "instruction score", "of 100", ".2f", _instruction_scores, "instruction_score", MORE
)

# Speed, time and cost


def _speed(record: RunRecord) -> Number:
    source = record.summary or record.progress
    speed = source.tokens_per_second if source else None
    return Inconclusive("not measured") if speed is None else speed


def _reported_speed(reported: Reported, _: RunRecord) -> float | None:
    return reported.training_speed


def _whole_speed(record: RunRecord) -> Number:
    """Tokens that this program trained, over all its seconds."""
    seconds = record.seconds.get("total")
    tokens = record.summary.trained_tokens if record.summary else record.tokens_seen if record.meta else None
    return tokens / seconds if tokens and seconds else None


def _reported_whole(reported: Reported, _: RunRecord) -> float | None:
    return reported.whole_run_speed


def _mfu(record: RunRecord) -> Number:
    source = record.summary or record.progress
    if source is None or source.mfu is None:
        return Inconclusive("peak of the device not known")
    return 100 * source.mfu


def _reported_mfu(reported: Reported, record: RunRecord) -> float | None:
    """Percentage computed from the reported speed: model FLOPs over the devices' peak (PaLM, arXiv:2204.02311)."""
    speed, peak = reported.training_speed, peak_flops(reported.device)
    if speed is None or peak is None or record.shape is None:
        return None
    return 100 * speed * record.shape.flops_per_token / (reported.gpus * peak)


def _peak_memory(record: RunRecord) -> Number:
    memory = record.summary.peak_memory_gib if record.summary else None
    return Inconclusive("recorded at the end of a run") if memory is None else memory


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600


def _without_validation(spent: Mapping[str, float]) -> float | None:
    """Total seconds or dollars less those of validation; None where the phases are not recorded."""
    return spent["total"] - spent.get("validation", 0.0) if {"total", "training"} <= spent.keys() else None


def _time(record: RunRecord) -> Number:
    return _hours(record.seconds.get("total"))


def _reported_time(reported: Reported, _: RunRecord) -> float | None:
    return _hours(reported.value("train_seconds"))


def _train_time(record: RunRecord) -> Number:
    return _hours(_without_validation(record.seconds))


def _reported_train_time(reported: Reported, _: RunRecord) -> float | None:
    return _hours(reported.seconds_without_validation)


def _dollars(record: RunRecord) -> Number:
    """Dollars of the whole run, as summary.json has them."""
    if "total" in record.seconds and "total" not in record.dollars:
        return Inconclusive("no price_per_hour in its train.json")
    return record.dollars.get("total")


def _train_cost(record: RunRecord) -> Number:
    dollars = _dollars(record)
    return dollars if isinstance(dollars, Inconclusive) else _without_validation(record.dollars)


def _per_million(record: RunRecord) -> Number:
    dollars, tokens = _dollars(record), record.tokens_seen
    if dollars is None or isinstance(dollars, Inconclusive):
        return dollars
    return dollars / tokens * 1e6 if tokens else None


def _reported_rate(reported: Reported, _: RunRecord) -> float | None:
    dollars, tokens = reported.value("train_dollars"), reported.value("tokens_seen")
    return dollars / tokens * 1e6 if dollars is not None and tokens else None


SPENT = (
    Quantity("tokens_per_second", "training speed", "tokens/s", ",.0f", _speed, _reported_speed, MORE),
    Quantity(
        "whole_tokens_per_second", "speed of the whole run", "tokens/s", ",.0f", _whole_speed, _reported_whole, MORE
    ),
    Quantity("mfu", "MFU", "%", ".1f", _mfu, _reported_mfu, MORE),
    Quantity("peak_memory", "peak memory", "GiB/device", ".2f", _peak_memory, "", LESS),
    Quantity("hours", "time", "h", ",.3f", _time, _reported_time, LESS),
    Quantity(
        "hours_without_validation", "time without validation", "h", ",.3f", _train_time, _reported_train_time, LESS
    ),
    Quantity("dollars", "cost", "$", MONEY, _dollars, "train_dollars", LESS),
    Quantity(
        "dollars_without_validation",
        "cost without validation",
        "$",
        MONEY,
        _train_cost,
        "dollars_without_validation",
        LESS,
    ),
    Quantity("dollars_per_million_tokens", "cost per million tokens", "$", ".4f", _per_million, _reported_rate, LESS),
)
