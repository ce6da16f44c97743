"""Schedules and the rules that scale rates and weight decay: exact numbers, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.planning.rates import Rates, Schedule, build_schedule, cosine, linear, linear_decay, scale_settings, warmup
from harness.runs.train_config import TrainConfig


def config(**keys: Any) -> TrainConfig:
    needed = {"dataset": "a/b", "microbatch_size": 1, "min_train_tokens": 1, "start_train_token": 0}
    return TrainConfig.model_validate({**needed, "checkpoint_interval": 1, **keys})


def schedule(total_steps: int, **keys: Any) -> Schedule:
    return build_schedule(config(**keys), total_steps)


def multipliers(built: Schedule) -> list[float]:
    return [built.multiplier(step) for step in range(built.total_steps)]


def test_warmup_rises_in_equal_parts_and_ends_at_one() -> None:
    assert [warmup(step, 4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert warmup(0, 1) == 1.0


def test_cosine_first_middle_last() -> None:
    assert cosine(0, 5, 0.1) == 1.0
    assert cosine(1, 5, 0.1) == pytest.approx(0.1 + 0.45 * (1 + math.sqrt(0.5)), rel=1e-15)
    assert cosine(2, 5, 0.1) == pytest.approx(0.55, rel=1e-15)
    assert cosine(3, 5, 0.1) == pytest.approx(0.1 + 0.45 * (1 - math.sqrt(0.5)), rel=1e-15)
    assert cosine(4, 5, 0.1) == 0.1
    assert cosine(4, 5, 0.0) == 0.0
    assert cosine(9, 5, 0.1) == 0.1, "past the end it stays at the floor"


def test_linear_decay_reaches_the_floor_at_its_last_step() -> None:
    values = [linear_decay(step, 4, 0.2) for step in range(-2, 4)]
    assert values == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2], rel=1e-15)
    assert linear_decay(9, 4, 0.2) == pytest.approx(0.2, rel=1e-15)


def test_linear_falls_in_equal_parts_and_wastes_no_step() -> None:
    assert [linear(step, 4, 0.0) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [linear(step, 4, 0.2) for step in range(4)] == pytest.approx([1.0, 0.8, 0.6, 0.4], rel=1e-15)


def test_linear_is_transformers() -> None:
    """Its multipliers after warm-up; there theirs begins with a step at zero, and ours is one part ahead."""
    import torch
    from transformers import get_linear_schedule_with_warmup

    total_steps = 40
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=total_steps)
    expected = []
    for _ in range(total_steps):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    built = schedule(total_steps, lr_schedule="linear", warmup_steps=10)
    assert multipliers(built)[10:] == pytest.approx(expected[10:], rel=1e-12)
    assert multipliers(built)[:10] == pytest.approx([value + 0.1 for value in expected[:10]], rel=1e-12)


def test_constant_with_and_without_warmup() -> None:
    assert multipliers(schedule(5)) == [1.0] * 5
    assert multipliers(schedule(5, warmup_steps=2)) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_cosine_with_warmup() -> None:
    expected = [0.5, 1.0, 1.0, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.1 + 0.45 * (1 - math.sqrt(0.5)), 0.1]
    assert multipliers(schedule(7, lr_schedule="cosine", warmup_steps=2)) == pytest.approx(expected, rel=1e-15)


def test_cosine_without_warmup_over_the_lab_notebooks_run() -> None:
    values = multipliers(schedule(30_615, lr_schedule="cosine"))
    assert values[0] == 1.0
    assert values[15_307] == pytest.approx(0.55, rel=1e-12)
    assert values[-1] == 0.1


def test_wsd_warms_up_stays_and_decays() -> None:
    built = schedule(10, lr_schedule="wsd", warmup_steps=2, decay_period_percent=40, min_lr_ratio=0.2)
    assert multipliers(built) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2], rel=1e-15)


def test_wsd_to_zero() -> None:
    built = schedule(4, lr_schedule="wsd", decay_period_percent=100, min_lr_ratio=0)
    assert multipliers(built) == [0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize(("percent", "steps"), [(0, 0), (5, 10), (12.5, 25), (100, 200)])
def test_warmup_as_a_percentage(percent: float, steps: int) -> None:
    assert schedule(200, warmup_period_percent=percent).warmup_steps == steps


@pytest.mark.parametrize(
    ("total_steps", "percent", "steps"),
    [(30_614, 5, 1530), (14_740, 5, 737), (14_214, 5, 710), (6_219, 5, 310), (99, 1, 0), (199, 0.5, 0), (41, 2.5, 1)],
)
def test_a_percentage_is_rounded_down_to_whole_steps(total_steps: int, percent: float, steps: int) -> None:
    """The lab notebook's program rounds so, for the steps of its four runs: whole steps times percent, over 100."""
    built = schedule(total_steps, lr_schedule="cosine", warmup_period_percent=percent)
    assert built.warmup_steps == steps
    assert built.multiplier(steps) == 1.0
    if steps:
        assert built.multiplier(steps - 1) == 1.0
        assert built.multiplier(0) == 1 / steps
    assert built.multiplier(total_steps - 1) == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("total_steps", [1, 2, 3, 50, 997])
@pytest.mark.parametrize("keys", [{"lr_schedule": "cosine"}, {"lr_schedule": "wsd", "decay_period_percent": 30}])
def test_rises_then_never_rises_again(keys: dict[str, Any], total_steps: int, ratio: float) -> None:
    built = schedule(total_steps, **keys, warmup_period_percent=20, min_lr_ratio=ratio)
    values = multipliers(built)
    before, after = values[: built.warmup_steps], values[built.warmup_steps :]
    assert before == sorted(before)
    assert after == sorted(after, reverse=True)
    assert all(0 < value <= 1 for value in before)
    assert all(ratio <= value + 1e-12 and value <= 1 for value in after)
    if total_steps > 3:
        assert max(values) == 1.0
        assert values[-1] == pytest.approx(ratio, abs=1e-12)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"warmup_steps": 1},
        {"lr_schedule": "cosine"},
        {"lr_schedule": "cosine", "warmup_steps": 1},
        {"lr_schedule": "wsd", "decay_period_percent": 20},
    ],
)
def test_a_run_of_one_step_trains_at_the_peak(keys: dict[str, Any]) -> None:
    assert multipliers(schedule(1, **keys)) == [1.0]


@pytest.mark.parametrize("shape", ["constant", "cosine"])
def test_warmup_as_long_as_the_run(shape: str) -> None:
    assert multipliers(schedule(4, lr_schedule=shape, warmup_steps=4)) == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("shape", ["constant", "cosine"])
def test_warmup_longer_than_the_run_is_refused(shape: str) -> None:
    with pytest.raises(UserError, match=r'"warmup_steps".* 5 .* 4 '):
        schedule(4, lr_schedule=shape, warmup_steps=5)


def test_warmup_and_decay_longer_than_the_run_are_refused() -> None:
    with pytest.raises(UserError, match=r'"warmup_steps".*"decay_period_percent"'):
        schedule(10, lr_schedule="wsd", warmup_steps=6, decay_period_percent=50)


@pytest.mark.parametrize("total_steps", range(1, 12))
@pytest.mark.parametrize("warmup_percent", [10, 25, 50, 75, 90])
def test_percentages_that_fit_together_fit_every_run(warmup_percent: int, total_steps: int) -> None:
    """Both lengths are rounded, and must not outlast a run of an odd number of steps."""
    built = schedule(
        total_steps,
        lr_schedule="wsd",
        warmup_period_percent=warmup_percent,
        decay_period_percent=100 - warmup_percent,
    )
    assert built.warmup_steps + built.decay_steps <= total_steps


def test_multiplier_depends_on_the_step_alone() -> None:
    built = schedule(20, lr_schedule="cosine", warmup_steps=3)
    forwards = multipliers(built)
    assert [built.multiplier(step) for step in reversed(range(20))] == forwards[::-1]


# The rules that scale

SETUP: dict[str, Any] = {"batch_tokens": 4 * 1024, "train_tokens": 10**6, "layers": 6}


def test_nothing_is_scaled_unasked() -> None:
    scaled = scale_settings(config(), **SETUP)
    assert (scaled.values, scaled.explained) == ({}, ())
    assert scaled.apply(config()) == config()


@pytest.mark.parametrize("batch", [256, 1024, 5000, 1_000_000])
def test_weight_decay_forgets_over_as_many_tokens(batch: int) -> None:
    """B/(eta·lambda) tokens, whatever the batch."""
    base = config(learning_rate=0.002, weight_decay=0.1, scale_with_batch={"reference_tokens": 1024})
    values = scale_settings(base, **SETUP | {"batch_tokens": batch}).values
    assert values["learning_rate"] == pytest.approx(0.002 * math.sqrt(batch / 1024), rel=1e-12)
    assert batch / (values["learning_rate"] * values["weight_decay"]) == pytest.approx(1024 / (0.002 * 0.1), rel=1e-12)


def test_weight_decay_forgets_over_the_same_part_of_the_run() -> None:
    """B/(eta·lambda·D), whatever the batch and the number of tokens."""
    rule = {"reference_tokens": 1024, "reference_train_tokens": 250_000}
    values = scale_settings(config(scale_with_batch=rule), **SETUP).values
    part = 4096 / (values["learning_rate"] * values["weight_decay"] * 10**6)
    assert part == pytest.approx(1024 / (0.0004 * 0.1 * 250_000), rel=1e-12)
    assert values == pytest.approx({"learning_rate": 0.0008, "weight_decay": 0.1 * 2 * 0.25}, rel=1e-12)


def test_depth_scales_weight_decay_alone() -> None:
    scaled = scale_settings(config(scale_with_depth={"reference_layers": 12}), **SETUP)
    assert scaled.values == pytest.approx({"weight_decay": 0.4}, rel=1e-12)
    assert scaled.explained == ("weight_decay 0.1 x (12 / 6)^2 = 0.4",)


def test_both_rules_say_how_each_number_came_about() -> None:
    both = config(scale_with_batch={"reference_tokens": 1024}, scale_with_depth={"reference_layers": 3})
    scaled = scale_settings(both, **SETUP)
    assert scaled.explained == (
        "learning_rate 0.0004 x sqrt(4,096 / 1,024) = 0.0008",
        "weight_decay 0.1 x sqrt(4,096 / 1,024) x (3 / 6)^2 = 0.05",
    )
    applied = scaled.apply(both)
    assert (applied.learning_rate, applied.weight_decay) == pytest.approx((0.0008, 0.05), rel=1e-12)
    assert (both.learning_rate, both.weight_decay) == (0.0004, 0.1)


def test_what_is_scaled_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(UserError, match=r'^train.json: key "weight_decay": 1e\+308 x sqrt\(4,096 / 16\) overflows'):
        scale_settings(config(weight_decay=1e308, scale_with_batch={"reference_tokens": 16}), **SETUP)


def test_a_ramp_has_the_rate_and_decay_of_each_steps_batch() -> None:
    """The values are those by hand, and B/(eta·lambda) is the same in each step."""
    ramped = config(scale_with_batch={"reference_tokens": 1024})
    largest = scale_settings(ramped, **SETUP).values
    for batch, by_hand in ((1024, 1.0), (2048, math.sqrt(2)), (4096, 2.0)):
        rate_factor, decay_factor = Rates.of(ramped, 10, 4096).at(0, batch)
        rate, decay = largest["learning_rate"] * rate_factor, largest["weight_decay"] * decay_factor
        assert (rate, decay) == pytest.approx((0.0004 * by_hand, 0.1 * by_hand), rel=1e-12)
        assert batch / (rate * decay) == pytest.approx(1024 / (0.0004 * 0.1), rel=1e-12)
    assert Rates.of(config(), 10, 4096).at(0, 1024) == (1.0, 1.0)
    assert Rates.of(config(warmup_steps=4), 10, 4096).at(0, 1024) == (0.25, 1.0)
