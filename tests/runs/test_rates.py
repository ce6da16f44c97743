"""Learning-rate schedules, and the rules that scale learning rate and weight decay, compared with exact numbers
calculated by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.planning.rates import Schedule, build_schedule, scale_settings
from harness.runs.train_config import TrainConfig


def config(**keys: Any) -> TrainConfig:
    needed = {"dataset": "a/b", "microbatch_size": 1, "min_train_tokens": 1, "start_train_token": 0}
    return TrainConfig.model_validate({**needed, "checkpoint_interval": 1, **keys})


def schedule(total_steps: int, **keys: Any) -> Schedule:
    return build_schedule(config(**keys), total_steps, 4096)


@pytest.mark.parametrize(
    ("total_steps", "keys", "expected"),
    [
        (5, {}, [1.0] * 5),
        (5, {"warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        (
            *(7, {"lr_schedule": "cosine", "warmup_steps": 2}),
            [0.5, 1.0, 1.0, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.1 + 0.45 * (1 - math.sqrt(0.5)), 0.1],
        ),
        (
            *(10, {"lr_schedule": "wsd", "warmup_steps": 2, "decay_period_percent": 40, "min_lr_ratio": 0.2}),
            [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2],
        ),
        (4, {"lr_schedule": "wsd", "decay_period_percent": 100, "min_lr_ratio": 0}, [0.75, 0.5, 0.25, 0.0]),
        (5, {"lr_schedule": "linear", "warmup_steps": 1}, [1.0, 1.0, 0.75, 0.5, 0.25]),
        (4, {"lr_schedule": "linear", "min_lr_ratio": 0.2}, [1.0, 0.8, 0.6, 0.4]),
        # After its end a decay stays at its minimum.
        (2, {"lr_schedule": "cosine"}, [1.0, 0.1, 0.1]),
        (2, {"lr_schedule": "linear"}, [1.0, 0.5, 0.0, 0.0]),
        (2, {"lr_schedule": "wsd", "decay_period_percent": 50, "min_lr_ratio": 0.2}, [1.0, 0.2, 0.2]),
        (4, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0]),
        (4, {"lr_schedule": "cosine", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0]),
        # A run of one step trains at the peak.
        (1, {"warmup_steps": 1}, [1.0]),
        (1, {"lr_schedule": "cosine"}, [1.0]),
        (1, {"lr_schedule": "cosine", "warmup_steps": 1}, [1.0]),
        (1, {"lr_schedule": "wsd", "decay_period_percent": 20}, [1.0]),
    ],
    ids=str,
)
def test_schedules_by_hand(total_steps: int, keys: dict[str, Any], expected: list[float]) -> None:
    built = schedule(total_steps, **keys)
    assert [built.multiplier(step) for step in range(len(expected))] == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("total_steps", "percent", "steps"),
    [
        *((200, 0, 0), (200, 12.5, 25), (200, 100, 200)),
        *((30_614, 5, 1530), (14_740, 5, 737), (14_214, 5, 710), (6_219, 5, 310), (99, 1, 0), (199, 0.5, 0)),
        (41, 2.5, 1),
    ],
)
def test_a_percentage_is_rounded_down_to_whole_steps(total_steps: int, percent: float, steps: int) -> None:
    """A warm-up has floor(steps * percent / 100) steps, as in the lab notebook's program. The steps of its four runs
    are among the cases."""
    built = schedule(total_steps, lr_schedule="cosine", warmup_period_percent=percent)
    assert built.warmup_steps == steps
    if steps:
        assert (built.multiplier(steps - 1), built.multiplier(0)) == (1.0, 1 / steps)
    if steps < total_steps:
        assert built.multiplier(steps) == 1.0
        assert built.multiplier(total_steps - 1) == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize("total_steps", [1, 2, 3, 50, 997])
@pytest.mark.parametrize("keys", [{"lr_schedule": "cosine"}, {"lr_schedule": "wsd", "decay_period_percent": 30}])
def test_rises_then_never_rises_again(keys: dict[str, Any], total_steps: int) -> None:
    for ratio in (0.0, 0.1, 1.0):
        built = schedule(total_steps, **keys, warmup_period_percent=20, min_lr_ratio=ratio)
        values = [built.multiplier(step) for step in range(total_steps)]
        before, after = values[: built.warmup_steps], values[built.warmup_steps :]
        assert before == sorted(before)
        assert after == sorted(after, reverse=True)
        assert all(0 < value <= 1 for value in before)
        assert all(ratio <= value + 1e-12 and value <= 1 for value in after)
        if total_steps > 3:
            assert max(values) == 1.0
            assert values[-1] == pytest.approx(ratio, abs=1e-12)


@pytest.mark.parametrize(
    ("total_steps", "keys", "words"),
    [
        (4, {"lr_schedule": "cosine", "warmup_steps": 5}, r'"warmup_steps".* 5 .* 4 '),
        (10, {"lr_schedule": "wsd", "warmup_steps": 6, "decay_period_percent": 50}, r'_steps".*"decay_period_percent"'),
    ],
    ids=str,
)
def test_parts_longer_than_the_run_are_refused(total_steps: int, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        schedule(total_steps, **keys)


@pytest.mark.parametrize("percent", [10, 25, 50, 75, 90])
def test_percentages_that_fit_together_fit_every_run(percent: int) -> None:
    """Warm-up and decay whose percentages add up to 100 fit into a run of any number of steps, although both lengths
    are rounded."""
    keys = {"lr_schedule": "wsd", "warmup_period_percent": percent, "decay_period_percent": 100 - percent}
    for total_steps in range(1, 12):
        built = schedule(total_steps, **keys)
        assert built.warmup_steps + built.decay_steps <= total_steps


# The scaling rules

SETUP: dict[str, Any] = {"batch_tokens": 4 * 1024, "train_tokens": 10**6, "layers": 6}


def test_nothing_is_scaled_unasked() -> None:
    scaled = scale_settings(config(), **SETUP)
    assert (scaled.values, scaled.explained) == ({}, ())


def test_weight_decay_forgets_over_the_same_part_of_the_run() -> None:
    """Weight decay acts over the same part B/(eta·lambda·D) of the run for each batch B and number of tokens D."""
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
    assert scaled.values == pytest.approx({"learning_rate": 0.0008, "weight_decay": 0.05}, rel=1e-12)


def test_what_is_scaled_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(UserError, match=r'^train.json: key "weight_decay": 1e\+308 x sqrt\(4,096 / 16\) overflows'):
        scale_settings(config(weight_decay=1e308, scale_with_batch={"reference_tokens": 16}), **SETUP)


def test_a_ramp_has_the_rate_and_decay_of_each_steps_batch() -> None:
    """With a batch ramp, learning rate and weight decay of each step equal those calculated by hand for the step's
    batch B. B/(eta·lambda) is the same in each step."""
    ramped = config(scale_with_batch={"reference_tokens": 1024})
    largest = scale_settings(ramped, **SETUP).values
    for batch, by_hand in ((1024, 1.0), (2048, math.sqrt(2)), (4096, 2.0)):
        rate_factor, decay_factor = build_schedule(ramped, 10, 4096).at(0, batch)
        rate, decay = largest["learning_rate"] * rate_factor, largest["weight_decay"] * decay_factor
        assert (rate, decay) == pytest.approx((0.0004 * by_hand, 0.1 * by_hand), rel=1e-12)
        assert batch / (rate * decay) == pytest.approx(1024 / (0.0004 * 0.1), rel=1e-12)
    assert schedule(10).at(0, 1024) == (1.0, 1.0)
    assert schedule(10, warmup_steps=4).at(0, 1024) == (0.25, 1.0)
