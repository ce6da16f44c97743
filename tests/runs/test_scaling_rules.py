"""The rules that scale learning rates and weight decay: their formulas by hand, and what they keep as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.planning.rates import Rates, scale_settings
from harness.runs.train_config import TrainConfig

SETUP: dict[str, Any] = {"batch_tokens": 4 * 1024, "train_tokens": 10**6, "layers": 6}


def config(**keys: Any) -> TrainConfig:
    needed = {"dataset": "a/b", "microbatch_size": 1, "min_train_tokens": 1, "start_train_token": 0}
    return TrainConfig.model_validate({**needed, "checkpoint_interval": 1, **keys})


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
