"""The quantities that were measured of a run's models: what lies in its `results/`, and the benchmarks that training
evaluated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from harness.comparison.comparability import (
    Measured,
    Measurement,
    Missing,
    benchmark_ground,
    bits_grounds,
    chosen_results,
    judging_ground,
    loss_ground,
    training_benchmark_ground,
)
from harness.comparison.quantities import LOSS_UNIT, Quantity, reported_value
from harness.comparison.records import RunRecord
from harness.runs.results import BenchmarkResult, BenchmarkScore, InstructionResult, LossResult, Result

# lm-eval's metrics, as it registers them; lines of metrics.jsonl do not say it.
LOWER_IS_BETTER = {
    **dict.fromkeys(("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "acc_all"), False),
    **dict.fromkeys(("exact_match", "f1", "mcc", "bleu", "chrf", "likelihood"), False),
    **dict.fromkeys(("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "ter", "brier_score"), True),
}
MEASURED_BY = {
    LossResult: "not measured by test_loss.py",
    InstructionResult: "not judged by judge_ift.py",
    BenchmarkResult: "not measured by evaluate_benchmarks.py",
}
NOT_FINITE = "its test loss is not finite"


def _missing(record: RunRecord, kind: type[Result]) -> Missing:
    """The reason why there is no result of that kind among those that were read."""
    if record.results.has_unread(kind):
        return Missing("kept in results/, but the file cannot be read (a remark names it); measure again")
    return Missing(MEASURED_BY[kind])


def test_losses(records: Sequence[RunRecord]) -> list[Measured]:
    """Test losses by run, one for each text that its model was measured on."""
    return [_test_loss(record) for record in records]


def _test_loss(record: RunRecord) -> Measured:
    measured = all_test_losses(record)
    found = [each for each in measured if math.isfinite(each.value)]
    if measured and not found:
        return Missing(NOT_FINITE)
    return found or _missing(record, LossResult)


def all_test_losses(record: RunRecord) -> list[Measurement]:
    """Test losses of a run, one for each text, NaN for a loss that is not finite."""
    results = record.results.of(LossResult)
    chosen = chosen_results(record, results, [loss_ground(result) for result in results])
    return [
        Measurement(math.nan if result.loss is None else result.loss, ground, remark)
        for result, ground, remark in chosen
    ]


def _bits_per_byte(records: Sequence[RunRecord]) -> list[Measured]:
    results = [record.results.of(LossResult) for record in records]
    grounds = iter(bits_grounds([result for of_run in results for result in of_run]))
    measured: list[Measured] = []
    for record, of_run in zip(records, results, strict=True):
        chosen = chosen_results(record, of_run, [next(grounds) for _ in of_run])
        found = [
            Measurement(result.bits_per_byte, ground, _bits_remark(result, remark))
            for result, ground, remark in chosen
            if result.bits_per_byte is not None
        ]
        if chosen and not found:
            are_finite = any(result.loss is not None for result, *_ in chosen)
            measured.append(Missing("bytes of its test text not known" if are_finite else NOT_FINITE))
        else:
            measured.append(found or _missing(record, LossResult))
    return measured


def _bits_remark(result: LossResult, remark: str) -> str:
    approximate = "" if result.bits_are_exact else "by the bytes per token of the whole split"
    return "; ".join(filter(None, [remark, approximate]))


def _instruction_scores(records: Sequence[RunRecord]) -> list[Measured]:
    return [_instruction_score(record) for record in records]


def _instruction_score(record: RunRecord) -> Measured:
    results = record.results.of(InstructionResult)
    chosen = chosen_results(record, results, [judging_ground(result) for result in results])
    found = [
        Measurement(result.mean, ground, remark, _interval(result))
        for result, ground, remark in chosen
        if result.mean is not None
    ]
    return found or _missing(record, InstructionResult)


def _interval(result: InstructionResult) -> str:
    """The judging's own 95 % interval."""
    return "" if result.low is None or result.high is None else f"({result.low:.1f} to {result.high:.1f})"


RESULTS: tuple[Quantity, ...] = (
    Quantity("test_loss", "test loss", LOSS_UNIT, ".3f", test_losses, reported_value("test_loss"), True, True),
    Quantity("bits_per_byte", "bits per byte", "", ".3f", _bits_per_byte, lower_is_better=True),
    Quantity(
        *("instruction_score", "instruction score", "of 100", ".2f", _instruction_scores),
        *(reported_value("instruction_score"), False, True),
    ),
)


def benchmark_quantities(records: Sequence[RunRecord]) -> list[Quantity]:
    """A quantity for each metric of each benchmark that one of the runs has."""
    keys = {
        (score.task, score.metric): score.higher_is_better
        for record in records
        for result in record.results.of(BenchmarkResult)
        for score in result.scores
    }
    return [
        Quantity(
            key=f"{task}_{metric}",
            title=f"{task} {metric}",
            unit="",
            style=".4g",
            measure=partial(_benchmarks, task, metric),
            lower_is_better=None if higher is None else not higher,
        )
        for (task, metric), higher in keys.items()
    ]


def _benchmarks(task: str, metric: str, records: Sequence[RunRecord]) -> list[Measured]:
    return [_benchmark(record, task, metric) for record in records]


def _benchmark(record: RunRecord, task: str, metric: str) -> Measured:
    results = record.results.of(BenchmarkResult)
    scores = [_score(result, task, metric) for result in results]
    there = [(result, score) for result, score in zip(results, scores, strict=True) if score is not None]
    by_id: Mapping[int, BenchmarkScore] = {id(result): score for result, score in there}
    chosen = chosen_results(record, [result for result, _ in there], [benchmark_ground(result) for result, _ in there])
    found = []
    for result, ground, remark in chosen:
        score = by_id[id(result)]
        if score.value is not None:
            error = "" if score.stderr is None else f"±{score.stderr:.2g}"
            found.append(Measurement(score.value, ground, remark, error))
    return found or _missing(record, BenchmarkResult)


def training_benchmark_quantities(records: Sequence[RunRecord]) -> list[Quantity]:
    """A quantity for each metric of each benchmark that one of the runs has evaluated while training."""
    keys = dict.fromkeys((event.task, event.metric) for record in records for event in record.benchmarks)
    return [
        Quantity(
            key=f"{task}_{metric}_while_training",
            title=f"{task} {metric} while training",
            unit="",
            style=".4g",
            measure=partial(_training_benchmarks, task, metric),
            lower_is_better=LOWER_IS_BETTER.get(metric.partition(",")[0]),
        )
        for task, metric in keys
    ]


def _training_benchmarks(task: str, metric: str, records: Sequence[RunRecord]) -> list[Measured]:
    return [_training_benchmark(record, task, metric) for record in records]


def _training_benchmark(record: RunRecord, task: str, metric: str) -> Measured:
    event = next((each for each in record.benchmarks if (each.task, each.metric) == (task, metric)), None)
    if event is None:
        return Missing("not measured while training")
    if event.value is None:
        return Missing("its score is not finite")
    remark = f"measured while training, after global step {event.global_step:,}"
    error = "" if event.stderr is None else f"±{event.stderr:.2g}"
    return [Measurement(event.value, training_benchmark_ground(record, event), remark, error)]


def _score(result: BenchmarkResult, task: str, metric: str) -> BenchmarkScore | None:
    return next(
        (each for each in result.scores if (each.task, each.metric) == (task, metric) and each.value is not None), None
    )
