"""Quantities in a table of runs: their sources, and the words for one that is not there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.comparison.comparability import (
    Ground,
    Measured,
    Measurement,
    Missing,
    training_ground,
    validation_ground,
)
from harness.comparison.records import RunRecord
from harness.runs.reported import Reported
from harness.runs.throughput import peak_flops

LOSS_UNIT = "nats/token"
MONEY = "money"  # the style of amounts that may be a fraction of a cent
EVERYWHERE = Ground("alike", "")  # of what needs no common ground: tokens, seconds, dollars
Get = Callable[[RunRecord], float | Missing | None]
GetReported = Callable[[Reported, RunRecord], float | None]
GroundOf = Callable[[RunRecord], Ground | None]
MeasureAll = Callable[[Sequence[RunRecord]], list[Measured]]


@dataclass(frozen=True)
class Quantity:
    """One thing to tell of every run: `measure` gives what was measured of all of them, in their order, and `report`
    what others have reported of one."""

    key: str  # in --sort and --json
    title: str
    unit: str
    style: str  # of format(), or MONEY
    measure: MeasureAll
    report: GetReported | None = None
    lower_is_better: bool | None = None
    is_score: bool = False  # so that figures reported by different sources do not compare


def reported_value(name: str) -> GetReported:
    return lambda reported, _record: reported.value(name)


def of_each(get: Get, missing: str, ground_of: GroundOf | None = None) -> MeasureAll:
    """A quantity that a run's own record says: `get`, or the reason that it gives, or `missing`; it compares where
    `ground_of` is equal, if that is given."""

    def measure(record: RunRecord) -> Measured:
        try:
            value = get(record)
            is_finite = not isinstance(value, int | float) or math.isfinite(value)
        except OverflowError:
            is_finite = False
        if not is_finite:
            return Missing("worked out from numbers that are too large")
        if isinstance(value, Missing):
            return value
        if value is None:
            return Missing("never trained" if record.state.word == "never trained" else missing)
        ground = EVERYWHERE if ground_of is None else ground_of(record)
        if ground is None:
            return Missing(f"{value:.3f}, but the text that it was measured on is not recorded, or not yet")
        return [Measurement(value, ground)]

    return lambda records: [measure(record) for record in records]


def _parameters(record: RunRecord) -> float | None:
    return record.shape.parameters if record.shape else None


def _active_parameters(record: RunRecord) -> float | None:
    """Active parameters; all of a dense model's, so that it stands beside those with experts."""
    return record.shape.active_parameters if record.shape else None


def _flops(record: RunRecord) -> float | None:
    shape, tokens = record.shape, record.tokens_seen
    return shape.flops_per_token * tokens if shape and tokens else None


def _reported_flops(reported: Reported, record: RunRecord) -> float | None:
    tokens = reported.value("tokens_seen")
    return record.shape.flops_per_token * tokens if record.shape and tokens else None


def _train_loss(record: RunRecord) -> float | None:
    if record.summary:
        return record.summary.final_train_loss
    return record.progress.train_loss if record.progress else None


def _validation_loss(record: RunRecord) -> float | Missing | None:
    if record.summary:
        value = record.summary.final_validation_loss
    else:
        value = record.progress.validation_loss if record.progress else None
    is_off = value is None and record.train and record.train.get("validation_interval") is None
    return Missing("trained without validation") if is_off else value


def final_validation_losses(records: Sequence[RunRecord]) -> list[Measured]:
    """Validation losses of runs that have finished, NaN for a loss that is not finite."""
    return [
        [Measurement(math.nan, ground)] if isinstance(each, Missing) and (ground := _diverged_on(record)) else each
        for record, each in zip(records, validation_losses(records), strict=True)
    ]


def _diverged_on(record: RunRecord) -> Ground | None:
    """The text of a last validation that was done, and whose loss is not finite."""
    summary, is_off = record.summary, record.train.get("validation_interval") is None
    if summary is None or is_off or "final_validation_loss" not in summary.model_fields_set:
        return None
    return validation_ground(record) if summary.final_validation_loss is None else None


def _best_validation_loss(record: RunRecord) -> float | Missing | None:
    last = _validation_loss(record)
    if last is None or isinstance(last, Missing):
        return last
    return record.summary.best_loss if record.summary else record.meta.best_loss if record.meta else None


def _speed(record: RunRecord) -> float | None:
    if record.summary:
        return record.summary.tokens_per_second
    return record.progress.tokens_per_second if record.progress else None


def _whole_speed(record: RunRecord) -> float | None:
    """Tokens that this program trained, over all its seconds."""
    source, hours = record.summary or record.meta, _hours(record)
    if source is None or not hours:
        return None
    tokens = record.summary.trained_tokens if record.summary else record.tokens_seen
    return tokens / (3600 * hours) if tokens else None


def _mfu(record: RunRecord) -> float | None:
    mfu = record.summary.mfu if record.summary else record.progress.mfu if record.progress else None
    return None if mfu is None else 100 * mfu


def _reported_mfu(reported: Reported, record: RunRecord) -> float | None:
    """Percentage computed from the reported speed: model FLOPs over the devices' peak (PaLM, arXiv:2204.02311)."""
    speed, peak = reported.training_speed, peak_flops(reported.device)
    if speed is None or peak is None or record.shape is None:
        return None
    return 100 * speed * record.shape.flops_per_token / (reported.gpus * peak)


def _memory(record: RunRecord) -> float | None:
    return record.summary.peak_memory_gib if record.summary else None


def _hours(record: RunRecord) -> float | None:
    return record.seconds["total"] / 3600 if "total" in record.seconds else None


def _hours_without_validation(record: RunRecord) -> float | None:
    seconds = _without_validation(record.seconds)
    return None if seconds is None else seconds / 3600


def _without_validation(spent: Mapping[str, float]) -> float | None:
    """Total seconds or dollars less those of validation; None where the phases are not recorded."""
    return spent["total"] - spent.get("validation", 0.0) if {"total", "training"} <= spent.keys() else None


def _reported_hours(reported: Reported, _record: RunRecord) -> float | None:
    seconds = reported.value("train_seconds")
    return None if seconds is None else seconds / 3600


def _reported_hours_without_validation(reported: Reported, _record: RunRecord) -> float | None:
    seconds = reported.seconds_without_validation
    return None if seconds is None else seconds / 3600


def _dollars(record: RunRecord) -> float | Missing | None:
    if _hours(record) is None or "total" in record.dollars:
        return record.dollars.get("total")
    return Missing("no price_per_hour in its train.json")


def _dollars_without_validation(record: RunRecord) -> float | Missing | None:
    dollars = _dollars(record)
    return _without_validation(record.dollars) if isinstance(dollars, float | int) else dollars


def _dollars_per_million(record: RunRecord) -> float | Missing | None:
    dollars, tokens = _dollars(record), record.tokens_seen
    if isinstance(dollars, Missing):
        return dollars
    return dollars / tokens * 1e6 if dollars is not None and tokens else None


def _reported_dollars_per_million(reported: Reported, _record: RunRecord) -> float | None:
    dollars, tokens = reported.value("train_dollars"), reported.value("tokens_seen")
    return dollars / tokens * 1e6 if dollars is not None and tokens else None


validation_losses = of_each(_validation_loss, "not recorded, or not finite", validation_ground)

TRAINED: tuple[Quantity, ...] = (
    Quantity(
        *("parameters", "parameters", "", ",.0f"),
        of_each(_parameters, "model not known"),
    ),
    Quantity(
        *("active_parameters", "active parameters", "", ",.0f"),
        of_each(_active_parameters, "model not known"),
    ),
    Quantity(
        *("global_batch", "global batch", "sequences", ",.0f"),
        of_each(lambda record: record.global_batch, "number of ranks not recorded yet"),
        reported_value("global_batch_size"),
    ),
    Quantity(
        *("tokens", "tokens", "", ",.0f"),
        of_each(lambda record: record.tokens_seen, "not recorded"),
        reported_value("tokens_seen"),
    ),
    Quantity("flops", "training FLOPs", "", ".2e", of_each(_flops, "not recorded"), _reported_flops),
    Quantity(
        *("train_loss", "train loss", LOSS_UNIT, ".3f"),
        of_each(_train_loss, "not recorded, or not finite", training_ground),
        *(reported_value("final_train_loss"), True, True),
    ),
    Quantity(
        *("validation_loss", "validation loss", LOSS_UNIT, ".3f"),
        validation_losses,
        *(reported_value("final_validation_loss"), True, True),
    ),
    Quantity(
        *("best_validation_loss", "best validation loss", LOSS_UNIT, ".3f"),
        of_each(_best_validation_loss, "not recorded, or not finite", validation_ground),
        lower_is_better=True,
    ),
)
SPENT: tuple[Quantity, ...] = (
    Quantity(
        *("tokens_per_second", "training speed", "tokens/s", ",.0f"),
        of_each(_speed, "not measured"),
        *(lambda reported, _record: reported.training_speed, False),
    ),
    Quantity(
        *("whole_tokens_per_second", "speed of the whole run", "tokens/s", ",.0f"),
        of_each(_whole_speed, "not recorded"),
        *(lambda reported, _record: reported.whole_run_speed, False),
    ),
    Quantity("mfu", "MFU", "%", ".1f", of_each(_mfu, "peak of the device not known"), _reported_mfu, False),
    Quantity(
        *("peak_memory", "peak memory", "GiB/device", ".2f"),
        of_each(_memory, "recorded at the end of a run"),
        lower_is_better=True,
    ),
    Quantity("hours", "time", "h", ",.3f", of_each(_hours, "not recorded"), _reported_hours, True),
    Quantity(
        *("hours_without_validation", "time without validation", "h", ",.3f"),
        of_each(_hours_without_validation, "not recorded"),
        *(_reported_hours_without_validation, True),
    ),
    Quantity("dollars", "cost", "$", MONEY, of_each(_dollars, "not recorded"), reported_value("train_dollars"), True),
    Quantity(
        *("dollars_without_validation", "cost without validation", "$", MONEY),
        of_each(_dollars_without_validation, "not recorded"),
        *(reported_value("dollars_without_validation"), True),
    ),
    Quantity(
        *("dollars_per_million_tokens", "cost per million tokens", "$", ".4f"),
        of_each(_dollars_per_million, "not recorded"),
        *(_reported_dollars_per_million, True),
    ),
)
