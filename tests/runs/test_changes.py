"""Messages about settings that differ from those in a run's checkpoint show values as the JSON files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.model.config import ModelConfig
from harness.planning.experiment import changed_settings, changes_of_result, check_continuable, comparable_losses
from harness.runs.checkpoint_meta import CheckpointMeta, Provenance
from harness.runs.train_config import TrainConfig
from tests.support.configs import SEED_MODEL, SEED_TRAIN, refusal

MOE = {"num_experts": 4, "num_active_experts": 2}


def provenance(model: dict[str, Any] | None = None, train: dict[str, Any] | None = None) -> Provenance:
    shape = ModelConfig.model_validate({**SEED_MODEL, **(model or {})})
    config = TrainConfig.model_validate({**SEED_TRAIN, **(train or {})})
    return Provenance(shape.model_dump(mode="json"), shape.parameters, config.model_dump(mode="json"), {"name": "a/b"})


def meta_of(then: Provenance) -> CheckpointMeta:
    return CheckpointMeta(global_step=3, model=then.model, train=then.train, dataset=then.dataset)


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({"qkv_bias": False}, {"linear_bias": False, "qkv_bias": False}, "linear_bias: true -> false"),
        ({}, {"moe": MOE}, 'moe: null -> {"num_experts": 4, "num_active_experts": 2}'),
        ({"moe": MOE}, {"moe": MOE | {"num_active_experts": 3}}, "moe: num_active_experts: 2 -> 3"),
        ({}, {"norm": "rmsnorm"}, 'norm: "layernorm" -> "rmsnorm"'),
    ],
    ids=str,
)
def test_another_model(then: dict[str, Any], now: dict[str, Any], said: str) -> None:
    message = refusal(check_continuable, meta_of(provenance(then)), Path("c"), provenance(now), begins="c")
    assert message == f"c: made with another model: {said}; restore the old model, or use --restart"


def test_another_place_in_the_text() -> None:
    """A run is not resumed if its `start_train_token` differs from the checkpoint's. This is also so if the checkpoint
    records none, like the notebook's."""
    now = provenance(train={"start_train_token": 7})
    for then, said in ((0, "0"), (None, "null")):
        meta = meta_of(provenance())
        meta.train["start_train_token"] = then
        message = refusal(check_continuable, meta, Path("c"), now, begins="c")
        assert f'"start_train_token": {said}, but train.json has 7; restore the old value' in message


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"microbatch_size": 3, "validation_batches": 600}, True),
        ({"microbatch_size": 3}, False),
        ({"start_val_token": 7}, False),
    ],
)
def test_the_best_loss_is_kept_while_losses_are_of_the_same_text(change: dict[str, Any], is_same: bool) -> None:
    then, now = provenance(train={"microbatch_size": 6}), provenance(train={"microbatch_size": 6, **change})
    for each in (then, now):
        each.dataset["validation"] = {"tokens": 10**9, "sha256": "aa" * 32}
    assert comparable_losses(meta_of(then), now) is is_same


def test_settings_that_may_change() -> None:
    then = provenance(train={"compile": False, "bucket_mb": None})
    now = provenance(train={"compile": "auto", "bucket_mb": 5, "shard_optimizer": True})
    assert changed_settings(then.train, now.train) == [
        "shard_optimizer: false -> true",
        'compile: false -> "auto"',
        "bucket_mb: null -> 5",
    ]


@pytest.mark.parametrize(
    ("change", "here", "recorded"),
    [
        ({"learning_rate": 0.006, "compile": False, "keep_checkpoints": 3}, {}, ["learning_rate: 0.0004 -> 0.006"]),
        ({"validation_interval": 7, "gradient_accumulation_steps": 3}, {}, []),  # compared as accumulation_steps
        ({}, {"accumulation_steps": 3}, ["accumulation_steps: 1 -> 3"]),
        ({"residual_precision": "bf16"}, {}, ['residual_precision: "fp32" -> "bf16"']),
        ({"precision": "fp32"}, {}, []),
        ({}, {"precision": "bf16", "world_size": 2}, ["world_size: 1 -> 2", 'precision: "fp32" -> "bf16"']),
        ({}, {"device": "NVIDIA H100"}, []),  # the checkpoint records no device
        ({"min_train_tokens": 10**9}, {}, []),
        ({"min_train_tokens": 10**9, "lr_schedule": "cosine"}, {}, ["min_train_tokens", "lr_schedule"]),
        ({"min_train_tokens": 10**9, "warmup_period_percent": 5.0}, {}, ["min_train_tokens", "warmup_period_percent"]),
    ],
    ids=str,
)
def test_changes_of_the_result_are_recorded(change: dict[str, Any], here: dict[str, Any], recorded: list[str]) -> None:
    meta = meta_of(provenance()).model_copy(update={"world_size": 1, "accumulation_steps": 1, "precision": "fp32"})
    today = {"world_size": 1, "accumulation_steps": 1, "device": "CPU", "precision": "fp32"} | here
    found = changes_of_result(meta, provenance(train=change).train, today, last_step=99)
    assert len(found) == len(recorded)
    for text in recorded:
        assert any(each.startswith(text) and each.endswith(" after global step 3") for each in found), found


def test_a_budget_of_the_same_steps_in_another_batch_is_recorded() -> None:
    """The rates so far were those of the old number of tokens: not those of a run with the new budget from its start,
    whose batch changed at the same step."""
    cosine = {"lr_schedule": "cosine", "min_train_tokens": 2560}
    now = provenance(train={**cosine, "min_train_tokens": 3840}).train
    meta = meta_of(provenance(train=cosine)).model_copy(update={"accumulation_steps": 1, "last_step": 39})
    assert changes_of_result(meta, now, {"accumulation_steps": 1}, last_step=39) == []
    assert changes_of_result(meta, now, {"accumulation_steps": 2}, last_step=39) == [
        "min_train_tokens: 2560 -> 3840 after global step 3",
        "accumulation_steps: 1 -> 2 after global step 3",
    ]
