"""The runs that count as replicates, and what is said of those that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.comparison.replicates import SEED, SURROUNDINGS, WITHOUT_EFFECT, Replicates, RunSetup, group_replicates
from harness.model.config import ModelConfig
from harness.runs.train_config import TrainConfig

MODEL = ModelConfig(
    vocab_size=64, context_length=8, emb_dim=8, n_heads=2, n_layers=2, drop_rate=0.0, qkv_bias=False
).model_dump(mode="json")
TRAIN = TrainConfig(
    dataset="builtin/python-stdlib",
    microbatch_size=8,
    min_train_tokens=1000,
    start_train_token=0,
    validation_interval=100,
    validation_batches=40,
    start_val_token=0,
    validation_ranks="all",
    learning_rate=0.0015,
    lr_schedule="cosine",
    warmup_steps=100,
    clipping_max_norm=1.0,
).model_dump(mode="json")
DATASET = {"name": "builtin/python-stdlib", "train": {"tokens": 9, "sha256": "ab"}}
SETUP = RunSetup(MODEL, TRAIN, DATASET, "2.15.0", "CPU", 1)
OTHER_VALUES: dict[str, Any] = {
    "price_per_hour": 12.5,
    "report_interval": 3,
    "keep_checkpoints": 2,
    "async_checkpoint": True,
    "validation_ranks": "rank0",
    "weights_check_interval": 7,
    "max_skipped_steps": 3,
    "benchmark_interval": 50,
    "benchmark_tasks": ["piqa"],
    "benchmark_examples": 10,
    "sample_interval": 50,
    "sample_prompt": "def ",
}


def with_train(**changes: Any) -> RunSetup:
    return replace(SETUP, train={**TRAIN, **changes})


def groups_of(**runs: RunSetup) -> list[tuple[str, ...]]:
    return [group.runs for group in group_replicates(runs).groups]


def test_keys_of_earlier_versions_count_where_they_were_on() -> None:
    off = with_train(random_seed=1, exact_dropout=False, target_hours=None)
    assert groups_of(off=off, now=with_train(random_seed=2)) == [("off", "now")]
    on = with_train(random_seed=3, exact_dropout=True)
    assert groups_of(on=on, now=with_train(random_seed=2)) == [("on",), ("now",)]


def test_runs_that_differ_in_their_seed_are_replicates() -> None:
    grouping = group_replicates(
        {"a": with_train(random_seed=1), "x": with_train(learning_rate=0.003), "b": with_train(random_seed=2)}
    )
    assert grouping.groups == [Replicates(("a", "b")), Replicates(("x",))]
    assert grouping.notes == []


def test_the_same_seed_again_counts_once() -> None:
    again = {"a": with_train(random_seed=1), "b": with_train(random_seed=1), "c": with_train(random_seed=2)}
    grouping = group_replicates(again)
    assert grouping.groups == [Replicates(("a", "c"), ("b",))]
    assert grouping.notes == ["b: seed of an earlier run with the same settings, counted once"]


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_keys_without_effect_on_the_outcome(key: str) -> None:
    assert TRAIN[key] != OTHER_VALUES[key], "the value is another"
    assert groups_of(a=SETUP, b=with_train(random_seed=1, **{key: OTHER_VALUES[key]})) == [("a", "b")]


@pytest.mark.parametrize("key", sorted(TrainConfig.model_fields.keys() - {*WITHOUT_EFFECT, SEED}))
def test_any_other_key_makes_another_arm(key: str) -> None:
    changed = {"betas": [0.1, 0.2], "initial_weights": "/a/file"}.get(key, 2 * (TRAIN[key] or 40))
    assert len(groups_of(a=SETUP, b=with_train(random_seed=1, **{key: changed}))) == 2


def test_keys_without_effect_are_those_that_say_so() -> None:
    assert {"price_per_hour", "validation_ranks", "sample_prompt"} <= {*WITHOUT_EFFECT}
    assert not {"checkpoint_interval", "microbatch_size"} & {*WITHOUT_EFFECT}


def test_another_model_or_data_set_is_another_arm() -> None:
    other = replace(with_train(random_seed=1), model={**MODEL, "n_layers": 3})
    assert len(groups_of(a=SETUP, b=other)) == 2
    other = replace(with_train(random_seed=1), dataset={**DATASET, "train": {"tokens": 9, "sha256": "cd"}})
    assert len(groups_of(a=SETUP, b=other)) == 2


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("torch", "2.14.0", "torch (2.15.0, 2.14.0)"),
        ("device", "NVIDIA H100", "device (CPU, NVIDIA H100)"),
        ("world_size", 2, "number of ranks (1, 2)"),
    ],
)
def test_other_surroundings_are_another_arm_and_told(key: str, value: Any, said: str) -> None:
    assert key in SURROUNDINGS
    elsewhere = replace(with_train(random_seed=1), **{key: value})
    grouping = group_replicates({"a": SETUP, "b": elsewhere, "c": with_train(random_seed=2)})
    assert [group.runs for group in grouping.groups] == [("a", "c"), ("b",)]
    assert grouping.notes == [f"a and b differ in {said}: not counted as replicates"]


def test_replicates_of_an_incomplete_record() -> None:
    nowhere = replace(with_train(random_seed=1), torch=None, dataset=None)
    grouping = group_replicates({"a": nowhere, "b": replace(nowhere, train=TRAIN)})
    assert [group.runs for group in grouping.groups] == [("a",), ("b",)]
    assert grouping.notes[0] == ("a: its replicates are unknown, because these were not recorded: dataset and torch")


def test_a_seed_that_changes_nothing_makes_no_replicates() -> None:
    first, second = (with_train(random_seed=seed, initial_weights="/a/model.safetensors") for seed in (1, 2))
    grouping = group_replicates({"a": first, "b": second})
    assert len(grouping.groups) == 2
    assert "random_seed changes nothing in it" in grouping.notes[0]
    dropping = {"a": replace(first, model={**MODEL, "drop_rate": 0.1})}
    dropping["b"] = replace(second, model={**MODEL, "drop_rate": 0.1})
    assert group_replicates(dropping).groups == [Replicates(("a", "b"))]


def test_weights_in_a_runs_own_folder_may_be_any() -> None:
    setup = replace(with_train(initial_weights="start.safetensors"), model={**MODEL, "drop_rate": 0.1})
    grouping = group_replicates({"a": setup, "b": replace(setup, train={**setup.train, "random_seed": 3})})
    assert len(grouping.groups) == 2
    assert "in its own folder" in grouping.notes[0]


def test_two_ways_of_saying_the_same() -> None:
    """Two spellings of a batch or of the checkpoints' interval are replicates; so are runs without newer keys."""
    by_batch = with_train(random_seed=1, gradient_accumulation_steps=1, global_batch_size=32)
    by_steps = with_train(random_seed=2, gradient_accumulation_steps=4)
    assert groups_of(a=by_batch, b=by_steps) == [("a", "b")]
    assert len(groups_of(a=by_batch, b=with_train(random_seed=2, gradient_accumulation_steps=2))) == 2
    assert groups_of(a=SETUP, b=with_train(random_seed=1, checkpoint_interval=100)) == [("a", "b")]
    required = {key for key, each in TrainConfig.model_fields.items() if each.is_required()}
    given = required | {key for key, value in TRAIN.items() if value != TrainConfig.model_fields[key].default}
    earlier = replace(SETUP, train={key: TRAIN[key] for key in given - {SEED}})
    assert groups_of(a=earlier, b=with_train(random_seed=1)) == [("a", "b")]
    assert group_replicates({"a": earlier, "b": SETUP}).groups == [Replicates(("a",), ("b",))]
