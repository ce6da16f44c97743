"""Runs that count as replicates, and the notes on runs that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.comparison.arms import SEED, SEEDS, WITHOUT_EFFECT, Arms, find_arms, kinds_of_chance
from harness.comparison.records import RunRecord, State
from harness.model.config import ModelConfig
from harness.runs.directory import RunDirectory
from harness.runs.summary import RunSummary
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
RECORDED: dict[str, Any] = {"dataset": DATASET, "torch": "2.15.0", "device": "CPU", "world_size": 1, "precision": None}

WEIGHTS = (SEEDS["init_seed"],)
DROPPING: dict[str, Any] = {"model": {"drop_rate": 0.1}}


def records_of(**runs: dict[str, Any]) -> list[RunRecord]:
    """Return the records of finished runs. The keywords are the runs' names. A run's dict has the keys that differ from
    TRAIN. Under "model" it has those that differ from MODEL, and under "summary" those that differ from RECORDED.
    "left_out" names keys that train.json lacks."""
    records = []
    for name, changes in runs.items():
        recorded = RECORDED | changes.pop("summary", {})
        model, left = {**MODEL, **changes.pop("model", {})}, changes.pop("left_out", ())
        train = {key: value for key, value in {**TRAIN, **changes}.items() if key not in left}
        state, directory = State("finished"), RunDirectory(Path("runs") / name)
        records.append(RunRecord(name, directory, state, model, train, RunSummary.model_construct(**recorded)))
    return records


def arms_of(**runs: dict[str, Any]) -> Arms:
    return find_arms(records_of(**runs))


def groups_of(**runs: dict[str, Any]) -> list[tuple[str, ...]]:
    return list(arms_of(**runs).run_names.values())


def test_runs_that_differ_in_their_seed_are_replicates() -> None:
    arms = arms_of(a={SEED: 1}, x={"learning_rate": 0.003}, b={SEED: 2})
    assert arms == Arms({"a": ("a", "b"), "x": ("x",)})


def test_the_same_seed_again_counts_once() -> None:
    arms = arms_of(a={SEED: 1}, b={SEED: 1}, c={SEED: 2})
    assert arms.run_names == {"a": ("a", "c")}
    assert arms.notes == ["b: not counted, because another run has the same seed and settings"]


def test_the_kinds_of_chance_are_those_whose_seeds_differ_and_are_used() -> None:
    order, dropout = SEEDS["data_seed"], SEEDS["dropout_seed"]
    shuffled = {"shuffle": True, **DROPPING}
    assert kinds_of_chance([records_of(a={}), records_of(b={SEED: 1, **DROPPING})]) == ()
    assert kinds_of_chance([records_of(a={**DROPPING}, b={SEED: 1, **DROPPING})]) == (*WEIGHTS, dropout)
    assert kinds_of_chance([records_of(a={**shuffled}, b={SEED: 1, **shuffled})]) == (*WEIGHTS, order, dropout)
    assert kinds_of_chance([records_of(a={**shuffled}, b={"data_seed": 1, **shuffled})]) == (order,)
    assert arms_of(a={}, b={"dropout_seed": 1}).notes == [
        "b: not counted, because another run has the same seed and settings"
    ]
    own = {"init_seed": 5, "data_seed": 5}
    assert kinds_of_chance([records_of(a={SEED: 5, **shuffled}, b={SEED: 7, **own, **shuffled})]) == (dropout,)
    given = {"initial_weights": "/a/model.safetensors", "shuffle": True}
    assert kinds_of_chance([records_of(a={**given}, b={SEED: 1, **given})]) == (order,)


def test_keys_of_earlier_versions_count_where_they_were_on() -> None:
    off = {SEED: 1, "exact_dropout": False, "target_hours": None}
    assert groups_of(off=off, now={SEED: 2}) == [("off", "now")]
    assert groups_of(on={SEED: 3, "exact_dropout": True}, now={SEED: 2}) == [("on",), ("now",)]


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_keys_without_effect_on_the_outcome(key: str) -> None:
    assert groups_of(a={}, b={SEED: 1, key: 2 * (TRAIN.get(key) or 40)}) == [("a", "b")]


@pytest.mark.parametrize(
    ("ranks", "compiles", "device", "is_other"),
    [
        (1, True, "x86_64 CPU", False),
        (2, False, "NVIDIA H100", False),
        (2, "auto", "x86_64 CPU", False),
        (2, "auto", "NVIDIA H100", True),
        (2, True, "x86_64 CPU", True),
        (3, False, "x86_64 CPU", True),
    ],
)
def test_bucket_mb_makes_another_arm_where_it_may_change_gradients(
    ranks: int, compiles: bool | str, device: str, is_other: bool
) -> None:
    earlier, now = (
        {SEED: seed, "bucket_mb": size, "compile": compiles, "summary": {"world_size": ranks, "device": device}}
        for seed, size in ((1, None), (2, 100))
    )
    assert groups_of(a=earlier, b=now) == ([("a",), ("b",)] if is_other else [("a", "b")])


OTHERS = TrainConfig.model_fields.keys() - {*WITHOUT_EFFECT, SEED, *SEEDS, "validation_sequences", "bucket_mb"}


@pytest.mark.parametrize("key", sorted(OTHERS))
def test_any_other_key_makes_another_arm(key: str) -> None:
    changed = {"betas": [0.1, 0.2], "initial_weights": "/a/file"}.get(key, 2 * (TRAIN[key] or 40))
    assert len(groups_of(a={}, b={SEED: 1, key: changed})) == 2


def test_keys_without_effect_are_those_that_say_so() -> None:
    assert {"price_per_hour", "validation_ranks", "sample_prompt"} <= {*WITHOUT_EFFECT}
    assert not {"checkpoint_interval", "microbatch_size"} & {*WITHOUT_EFFECT}


def test_another_model_or_data_set_is_another_arm() -> None:
    other = {**DATASET, "train": {"tokens": 9, "sha256": "cd"}}
    assert len(groups_of(a={}, b={SEED: 1, "model": {"n_layers": 3}})) == 2
    assert len(groups_of(a={}, b={SEED: 1, "summary": {"dataset": other}})) == 2


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        ({}, {"torch": "2.14.0"}, "torch (2.15.0, 2.14.0)"),
        ({}, {"device": "NVIDIA H100"}, "device (CPU, NVIDIA H100)"),
        ({}, {"world_size": 2}, "number of ranks (1, 2)"),
        # "auto" can choose different precisions on two CPUs that are recorded under one name ("x86_64 CPU").
        ({"precision": "bf16"}, {"precision": "fp32"}, "precision (bf16, fp32)"),
        ({}, {"attention": "FA3"}, "attention (auto, FA3)"),
    ],
    ids=["torch", "device", "ranks", "precision", "attention"],
)
def test_other_surroundings_are_another_arm_and_noted(first: dict[str, Any], other: dict[str, Any], said: str) -> None:
    own, others = {"summary": first}, {"summary": other}
    rate = {"learning_rate": 0.003}
    arms = arms_of(a={**own}, b={SEED: 1, **others}, x=rate, c={SEED: 2, **own}, d={SEED: 3, **others})
    assert [*arms.run_names.values()] == [("a", "c"), ("b", "d"), ("x",)]
    assert arms.notes == [f"a, b differ in {said}: not counted as replicates"]


@pytest.mark.parametrize(
    "summary",
    [
        {"changed": ["learning_rate: 0.001 -> 0.0015 after global step 27"]},
        {"tokens_seen": 1000, "trained_tokens": 600},  # another program trained the others
        {"tokens_seen": 1600, "trained_tokens": 1600},  # its budget was lowered when it had seen more
    ],
    ids=str,
)
def test_a_change_during_training_makes_another_arm(summary: dict[str, Any]) -> None:
    arms = groups_of(a={}, b={SEED: 1, "summary": summary}, c={SEED: 2}, d={SEED: 3, "summary": summary})
    assert arms == [("a", "c"), ("b", "d")]


def test_summaries_without_precision_compare_as_before_unless_two_are_recorded() -> None:
    """Summaries of earlier versions do not record the precision. Their runs still count as replicates of other runs,
    unless those record two different precisions."""
    low, full = {"summary": {"precision": "bf16"}}, {"summary": {"precision": "fp32"}}
    assert arms_of(a={}, b={SEED: 1, **low}) == Arms({"a": ("a", "b")})
    arms = arms_of(a={}, b={SEED: 1, **low}, c={SEED: 2, **full})
    assert arms.run_names == {"a": ("a",), "b": ("b",), "c": ("c",)}
    assert arms.notes == ["a, b, c differ in precision (not recorded, bf16, fp32): not counted as replicates"]
    elsewhere = arms_of(a={}, b={SEED: 1, "summary": {"device": "NVIDIA H100", "precision": "bf16"}})
    assert elsewhere.notes == ["a, b differ in device (CPU, NVIDIA H100): not counted as replicates"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"summary": {"torch": None, "dataset": None}}, "these were not recorded: dataset, torch"),
        ({"global_batch_size": 32, "left_out": ["microbatch_size"]}, "its microbatch_size was not recorded"),
        ({"initial_weights": "/a/model.safetensors"}, "random_seed changes nothing in it: "),
    ],
)
def test_runs_whose_replicates_are_unknown_stand_alone(changes: dict[str, Any], reason: str) -> None:
    arms = arms_of(a={SEED: 1, **changes}, b={SEED: 2, **changes})
    assert arms.run_names == {"a": ("a",), "b": ("b",)}
    assert arms.notes[0].startswith(f"a: an arm of its own; its replicates are unknown, because {reason}")


def test_weights_in_a_runs_own_folder_are_not_those_of_the_same_name_in_another() -> None:
    """A relative path of initial weights begins at the run's folder. Derived runs name the file of their base."""
    own, of_a = ({"initial_weights": f"{place}start.safetensors", **DROPPING} for place in ("", "../a/"))
    assert groups_of(a={SEED: 1, **own}, b={SEED: 2, **of_a}, c={SEED: 3, **own}) == [("a", "b"), ("c",)]


def test_two_spellings_of_the_same_settings_are_replicates() -> None:
    """Runs are replicates even if one spells the same batch size or checkpoint interval in another way. Runs that lack
    newer keys are replicates, too."""
    by_batch = {SEED: 1, "gradient_accumulation_steps": 1, "global_batch_size": 32}
    assert groups_of(a={**by_batch}, b={SEED: 2, "gradient_accumulation_steps": 4}) == [("a", "b")]
    assert len(groups_of(a={**by_batch}, b={SEED: 2, "gradient_accumulation_steps": 2})) == 2
    assert groups_of(a={}, b={SEED: 1, "checkpoint_interval": 100}) == [("a", "b")]
    rows = TRAIN["validation_batches"] * TRAIN["microbatch_size"]
    in_rows = {"validation_batches": None, "validation_sequences": rows}
    assert groups_of(a={}, b={SEED: 1, **in_rows}) == [("a", "b")]
    assert len(groups_of(a={}, b={SEED: 1, **in_rows, "validation_sequences": rows + 1})) == 2
    fields = TrainConfig.model_fields
    newer = [key for key, value in TRAIN.items() if not fields[key].is_required() and value == fields[key].default]
    assert groups_of(a={"left_out": newer}, b={SEED: 1}) == [("a", "b")]
    assert groups_of(a={"left_out": newer}, b={}) == [("a",)], "the default seed is the same seed"
