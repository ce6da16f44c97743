"""Loading train.json and model.json: the values that are accepted, those that are refused, and the error messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from harness.common.errors import UserError
from harness.common.json_files import RunFile, json_schema
from harness.common.other_names import COUNTERPARTS, WITHOUT_KEY
from harness.model.config import ModelConfig
from harness.planning.rates import build_schedule
from harness.runs.train_config import TrainConfig, load_train_config
from tests.support.configs import SEED_MODEL, SEED_TRAIN, WriteModel, WriteTrain, changed, refusal


def defaults(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the optional keys with their defaults. Another test compares docs/configuration.md with them."""
    return {name: field.default for name, field in kind.model_fields.items() if not field.is_required()}


# Accepted


def test_the_seeds_keys_are_enough(train: WriteTrain, model: WriteModel) -> None:
    assert {key: getattr(train(), key) for key in SEED_TRAIN} == SEED_TRAIN
    assert {key: getattr(model(), key) for key in SEED_MODEL} == SEED_MODEL


ACCEPTED: dict[str, list[dict[str, Any]]] = {
    "train": [
        {"random_seed": 0},
        {"random_seed": 2**63 - 1},
        {"betas": [0.9, 0.95]},
        {"lr_schedule": "cosine", "warmup_period_percent": 5.5, "min_lr_ratio": 0.0},
        {"lr_schedule": "wsd", "decay_period_percent": 20.0, "warmup_steps": 0},
        {"lr_schedule": "wsd", "decay_period_percent": 50, "warmup_period_percent": 50},
        {"embedding_learning_rate": 0.1, "head_learning_rate": 0.2, "vector_learning_rate": 0.3},
        {"optimizer": "muon", "precision": "fp32", "muon_learning_rate": 0.02, "muon_update_scale": "original"},
        {"optimizer": "muon", "precision": "bf16", "muon_weight_decay": 0, "muon_momentum": 0},
        {"optimizer": "muon", "muon_momentum": 0.85, "muon_momentum_warmup_steps": 300},
        {"attention": "flash", "deterministic": True},
        {"price_per_hour": 0.0, "report_interval": 1, "min_train_tokens": -1, "max_hours": 0.5},
        {"price_per_hour": 2.5, "max_dollars": 40},
        {"on_end": ["sudo", "poweroff"], "notify": "https://ntfy.sh/topic"},
        {"sample_interval": 100, "sample_prompt": "Every effort\nmoves you ✓"},
    ],
    "model": [
        {"n_kv_heads": 12},
        {"position": "rope", "rope_base": 500_000.0},
        {"qk_norm": True, "norm_gain": False},
        {"mlp_dim": 1, "drop_rate": 0, "head_dim": 100},
        {"value_embeddings": 6},
        {"value_embeddings": 12},
        {"bigram_embedding": 2},
    ],
}


@pytest.mark.parametrize(("file", "changes"), [(file, each) for file in ACCEPTED for each in ACCEPTED[file]], ids=str)
def test_accepted_values(train: WriteTrain, model: WriteModel, file: str, changes: dict[str, Any]) -> None:
    config = (train if file == "train" else model)(**changes)
    for key, value in changes.items():
        assert getattr(config, key) == (tuple(value) if key == "betas" else value)


def test_a_whole_number_is_a_number(train: WriteTrain) -> None:
    for key in ("learning_rate", "weight_decay", "eps", "clipping_max_norm", "price_per_hour"):
        result = getattr(train(**{key: 1}), key)
        assert (type(result), result) == (float, 1)


# Refused: keys


@pytest.mark.parametrize(
    ("file", "key", "words"),
    [
        ("train", "microbatch", 'unknown; did you mean "microbatch_size"?'),
        ("train", "grad_accumulation_steps", 'did you mean "gradient_accumulation_steps"?'),
        ("train", "Precision", 'unknown; did you mean "precision"?'),
        ("train", "emb_dim", "belongs in model.json"),
        ("train", "depth", "belongs in model.json"),
        ("model", "n_layer", 'unknown; did you mean "n_layers"?'),
        ("model", "embed_dim", 'unknown; did you mean "emb_dim"?'),
        ("model", "dropout_rate", 'unknown; did you mean "drop_rate"?'),
        ("model", "dept", 'unknown; did you mean "depth"?'),
        ("model", "learning_rate", "belongs in train.json"),
        ("model", "minibatch_size", "belongs in train.json"),
    ],
)
def test_the_message_on_an_unknown_key_names_the_right_one(
    train: WriteTrain, model: WriteModel, file: str, key: str, words: str
) -> None:
    sizes = {name: ... for name in ("n_layers", "n_heads", "emb_dim") if key == "dept"}
    assert re.search(
        rf'key "{key}": .*{re.escape(words)}', refusal(train if file == "train" else model, **{key: 1}, **sizes)
    )


@pytest.mark.parametrize(
    "key", ["zzzzzz", "two\nlines", "carriage\rreturn", "line\u2028separator", "", "minibatch_sizes", "use_ampp"]
)
def test_a_key_like_no_other_has_no_suggestion(train: WriteTrain, key: str) -> None:
    """The message on an unknown key is one line. It suggests no key if none is similar, and never a deprecated
    spelling."""
    message = refusal(train, **{key: 1})
    assert "unknown" in message
    assert not re.search(r'did you mean "(minibatch_size|use_amp|schedule_learning_rate)"', message)
    assert key != "zzzzzz" or "did you mean" not in message


# Other programs' keys

# Keys of nanoGPT and transformers, and this program's keys for the same settings, by those programs' documentation.
FOREIGN = [
    ("train.json", "batch_size", "microbatch_size"),
    ("train.json", "max_iters", "train_steps"),
    ("train.json", "min_lr", "min_lr_ratio"),
    ("train.json", "bf16", "precision"),
    ("model.json", "n_embd", "emb_dim"),
    ("model.json", "dropout", "drop_rate"),
    ("model.json", "bias", "qkv_bias"),
    ("model.json", "num_local_experts", "moe"),
]


@pytest.mark.parametrize(("file", "name", "ours"), FOREIGN)
def test_other_programs_keys_lead_to_ours(
    train: WriteTrain, model: WriteModel, file: str, name: str, ours: str
) -> None:
    own, other = (train, model) if file == "train.json" else (model, train)
    assert re.search(rf'key "{name}": unknown; did you mean "{ours}"( \(.+\))?\?$', refusal(own, **{name: 1}))
    assert f'key "{name}": unknown; did you mean "{ours}" in {file}' in refusal(other, **{name: 1})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lr_decay_iters", "ends with the run"),
        ("always_save_checkpoint", "keep_checkpoints"),
        ("wandb_log", "metrics.jsonl"),
        ("backend", "nccl on GPUs"),
        ("resume_from_checkpoint", "the same command continues"),
        ("Output-Dir", "the run's own folder"),
    ],
)
def test_what_other_programs_have_and_we_have_not(train: WriteTrain, model: WriteModel, name: str, words: str) -> None:
    for write in (train, model):
        message = refusal(write, **{name: 1})
        assert f'key "{name}": ' in message
        assert words in message
        assert "did you mean" not in message


def test_units_are_told_where_they_differ(train: WriteTrain) -> None:
    assert "sequences per device" in refusal(train, batch_size=12)
    assert "in global steps" in refusal(train, max_iters=600_000)
    assert 'with "min_train_tokens": -1' in refusal(train, num_train_epochs=1)
    assert "min_lr divided by learning_rate" in refusal(train, min_lr=6e-5)
    assert "times 100" in refusal(train, warmup_ratio=0.05)


def test_a_wrong_name_comes_before_the_key_that_is_missing_because_of_it(train: WriteTrain, model: WriteModel) -> None:
    line = refusal(train, microbatch_size=..., batch_size=12)
    assert re.search(
        r'key "batch_size": unknown; did you mean "microbatch_size" .+; key "microbatch_size": missing$', line
    )
    line = refusal(model, emb_dim=..., n_embd=768)
    assert line.endswith('key "n_embd": unknown; did you mean "emb_dim"?; key "emb_dim": missing')


def test_advice_leads_to_keys_that_there_are() -> None:
    kinds: dict[str, type[RunFile]] = {"train.json": TrainConfig, "model.json": ModelConfig}
    fields = {*TrainConfig.model_fields, *ModelConfig.model_fields}
    for file, names in COUNTERPARTS.items():
        assert {ours for ours, _ in names.values()} <= kinds[file].model_fields.keys()
        assert not names.keys() & (fields | WITHOUT_KEY.keys())
    assert not fields & WITHOUT_KEY.keys()


# An editor's schema


def test_the_place_of_a_schema_is_no_part_of_the_configuration(train: WriteTrain, model: WriteModel) -> None:
    for write in (train, model):
        assert write(**{"$schema": "https://example.org/schema"}) == write()
        for place in (1, None, {"a": 1}):
            assert 'key "$schema": must be a JSON Schema\'s path or URL' in refusal(write, **{"$schema": place})


@pytest.mark.parametrize("kind", [TrainConfig, ModelConfig])
def test_the_schema_for_editors_describes_every_key(kind: type[RunFile]) -> None:
    schema = json.loads(json.dumps(json_schema(kind), allow_nan=False))
    assert schema["properties"].pop("$schema")["type"] == "string"
    assert "$schema" not in schema["required"]
    assert {key for key, entry in schema["properties"].items() if not entry.get("deprecated")} >= {*kind.model_fields}
    assert schema["additionalProperties"] is False
    for key, entry in schema["properties"].items():
        assert len(entry.get("description", "")) > 5, key
    for key, default in json.loads(json.dumps(defaults(kind))).items():
        assert schema["properties"][key]["default"] == default, key


def test_a_missing_key_is_named(train: WriteTrain, model: WriteModel) -> None:
    for key in ("dataset", "microbatch_size", "min_train_tokens", "start_train_token"):
        assert f'key "{key}": missing' in refusal(train, **{key: ...})
    for key in SEED_MODEL:
        assert f'key "{key}": missing' in refusal(model, **{key: ...})


def test_every_fault_is_told_at_once(train: WriteTrain) -> None:
    message = refusal(train, dataset=..., microbatch_size="13", learning_rat=1)
    assert 'key "dataset"' in message
    assert 'key "microbatch_size"' in message
    assert 'key "learning_rat"' in message


# Refused: types and values

# Name of a type (JSON Schema's, or "choice") -> values of other types.
WRONG: dict[str, list[Any]] = {
    "integer": [True, "1", 1.5, 1.0, [1], {"a": 1}],
    "number": [True, "0.1", [0.1], {}],
    "boolean": [1, 0, "true", "yes", None],
    "choice": ["other", "", 1, None, ["fp32"]],
}


def kind_of(schema: dict[str, Any]) -> str:
    """Return the type that a key's schema names, or "choice" if the schema lists the allowed words."""
    branches = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    if all("enum" in each or "const" in each for each in branches):
        return "choice"
    return str(branches[0].get("type", ""))


KEYS_AND_KINDS = [
    (key, kind)
    for key, schema in TrainConfig.model_json_schema()["properties"].items()
    if (kind := kind_of(schema)) in WRONG
]


@pytest.mark.parametrize(("key", "kind"), KEYS_AND_KINDS)
def test_a_value_of_another_type_is_refused_and_shown(train: WriteTrain, key: str, kind: str) -> None:
    assert set(dict(KEYS_AND_KINDS).values()) == WRONG.keys(), "the schema must show the kinds of keys"
    for value in WRONG[kind]:
        message = refusal(train, **{key: value})
        assert f'key "{key}": ' in message
        assert json.dumps(value) in message, "the message does not show the value"


@pytest.mark.parametrize("value", [1, None, True, {"name": "a/b"}])
def test_not_a_string(train: WriteTrain, value: Any) -> None:
    assert 'key "dataset": ' in refusal(train, dataset=value)
    if value is not None:
        assert 'key "sample_prompt": ' in refusal(train, sample_prompt=value, sample_interval=1)


def test_impossible_betas(train: WriteTrain) -> None:
    wrong = [[0.9], [0.9, 0.95, 0.99], 0.9, "0.9", None, ["0.9", 0.95], [True, 0.95], [1.0, 0.9], [0.9, -0.1], {"a": 1}]
    for betas in wrong:
        assert re.search(r'key "betas(\.\d)?": ', refusal(train, betas=betas))


IMPOSSIBLE: list[tuple[float, tuple[str, ...]]] = [
    (0, ("microbatch_size", "min_train_tokens", "validation_interval", "validation_batches", "train_steps")),
    (0, ("gradient_accumulation_steps", "global_batch_size", "learning_rate", "eps", "clipping_max_norm")),
    (0, ("checkpoint_interval", "keep_checkpoints", "bucket_mb", "report_interval", "max_skipped_steps")),
    (0, ("tokens_per_parameter", "decay_period_percent", "max_hours", "max_dollars")),
    (9e-38, ("eps",)),
    (-1, ("start_train_token", "start_val_token", "random_seed", "warmup_steps", "warmup_period_percent")),
    (-1, ("price_per_hour", "target_flops")),
    (-0.1, ("learning_rate", "weight_decay", "min_lr_ratio", "moe_router_loss_scale")),
    (-2, ("min_train_tokens",)),
    (1.1, ("min_lr_ratio",)),
    (101, ("decay_period_percent",)),
    (100.5, ("warmup_period_percent",)),
    (10.1, ("learning_rate", "embedding_learning_rate", "head_learning_rate", "vector_learning_rate")),
    (2**63, ("random_seed",)),
]


@pytest.mark.parametrize(("value", "keys"), IMPOSSIBLE)
def test_impossible_values(train: WriteTrain, value: float, keys: tuple[str, ...]) -> None:
    for key in keys:
        assert f'key "{key}": ' in refusal(train, **{key: value})


def test_rates_that_others_use(train: WriteTrain) -> None:
    config = train(optimizer="muon", learning_rate=0.22, embedding_learning_rate=1.2, muon_learning_rate=0.24)
    assert (config.learning_rate, config.muon_learning_rate) == (0.22, 0.24)
    assert 'key "muon_learning_rate": ' in refusal(train, optimizer="muon", muon_learning_rate=20)


def test_a_number_too_large_for_a_float(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    for key in ("learning_rate", "weight_decay", "eps", "clipping_max_norm", "price_per_hour", "min_lr_ratio"):
        path.write_text(changed(SEED_TRAIN, {key: "HUGE"}).replace('"HUGE"', "1e999"))
        assert f'key "{key}": ' in refusal(load_train_config, path)


# Refused: combinations


NO_VALIDATION: dict[str, Any] = {"validation_interval": ..., "validation_batches": ..., "start_val_token": ...}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradient_accumulation_steps": 1, "global_batch_size": 104}, '"gradient_accumulation_steps": give only one'),
        ({"warmup_steps": 1, "warmup_period_percent": 1}, '"warmup_steps" and "warmup_period_percent": give only one'),
        ({"lr_schedule": "cosine", "decay_period_percent": 9}, '"decay_period_percent": belongs with "lr_schedule"'),
        ({"lr_schedule": "wsd", "decay_period_percent": 60, "warmup_period_percent": 41}, "together above 100"),
        ({"lr_schedule": "wsd"}, 'key "decay_period_percent": missing; "lr_schedule": "wsd" needs it'),
        ({"lr_schedule": "linear", "decay_period_percent": 20}, 'belongs with "lr_schedule": "wsd"; remove it'),
        ({"min_lr_ratio": 0.0}, 'key "min_lr_ratio": belongs with "lr_schedule": "cosine", "wsd" or "linear"'),
        ({"optimizer": "muon", "precision": "fp16"}, 'keys "optimizer" and "precision"'),
        ({"optimizer": "muon", "muon_momentum": 0.8, "muon_momentum_warmup_steps": 9}, "momentum rises from 0.85, and"),
        ({"muon_learning_rate": 0.02}, 'key "muon_learning_rate": belongs with "optimizer": "muon"; remove it'),
        ({"muon_update_scale": "original"}, 'key "muon_update_scale": belongs with "optimizer": "muon"; remove it'),
        ({"residual_precision": "bf16", "precision": "fp32"}, 'key "residual_precision": "bf16" needs "precision"'),
        ({"residual_precision": "bf16", "precision": "fp16"}, 'key "residual_precision": "bf16" needs "precision"'),
        ({"attention": "cudnn", "deterministic": True}, 'keys "attention" and "deterministic": the backward pass of'),
        ({"sample_interval": 1}, 'keys "sample_interval" and "sample_prompt": give both or neither'),
        ({"max_dollars": 5}, 'key "max_dollars": needs "price_per_hour" above 0'),
        ({"max_dollars": 5, "price_per_hour": 0}, 'key "max_dollars": needs "price_per_hour" above 0'),
        ({"on_end": []}, 'key "on_end": '),
        ({"on_end": ["a\0b"]}, 'key "on_end": has a NUL character'),
        ({"notify": ["secret"]}, 'key "notify": input should be a valid string'),
        ({"notify": "ftp://secret"}, 'key "notify": must begin with http:// or https://'),
        ({"sample_prompt": "def"}, 'keys "sample_interval" and "sample_prompt": give both or neither'),
        ({"benchmark_interval": 1}, 'keys "benchmark_interval" and "benchmark_tasks": give both or neither'),
        ({"validation_interval": ...}, 'key "validation_interval": missing; validation needs it'),
        ({"validation_batches": ...}, 'key "validation_sequences": missing; validation needs it'),
        ({"start_val_token": ...}, 'key "start_val_token": missing; validation needs it'),
        ({"validation_sequences": 8}, 'keys "validation_sequences" and "validation_batches": give only one of them'),
        ({"data_seed": 1}, 'key "data_seed": belongs with "shuffle": true; remove the seed, or shuffle'),
        ({"epochs": "repeat", "min_train_tokens": -1}, 'key "epochs": "repeat" with "min_train_tokens": -1 has no end'),
        ({"epochs": 0}, 'key "epochs":'),
        ({"epochs": "twice"}, 'key "epochs":'),
        ({"validation_interval": ..., "checkpoint_interval": 1}, 'key "validation_interval": missing'),
        (NO_VALIDATION, "give validation_interval, validation_sequences and start_val_token, or checkpoint_interval"),
        ({"min_train_tokens": ...}, '"train_steps", "tokens_per_parameter", "target_flops"'),
        ({"train_steps": 5}, 'keys "min_train_tokens" and "train_steps": give only one of them'),
        ({"min_train_tokens": ..., "target_flops": 1e18, "train_steps": 1}, '"train_steps" and "target_flops": '),
        ({"batch_ramp": [[0, 8]], "global_batch_size": 8}, 'keys "global_batch_size" and "batch_ramp": give only one'),
        ({"batch_ramp": [[0, 8]], "gradient_accumulation_steps": 2}, '"gradient_accumulation_steps" and "batch_ramp"'),
        ({"batch_ramp": []}, 'key "batch_ramp": list should have at least 1 item, not []'),
        ({"batch_ramp": [[0, 8, 9]]}, 'key "batch_ramp.0": tuple should have at most 2 items, not [0, 8, 9]'),
        ({"batch_ramp": [[5, 8]]}, 'key "batch_ramp": must begin at token 0'),
        ({"batch_ramp": [[0, 8], [0, 16]]}, 'key "batch_ramp": sequences must be at least 1'),
        ({"batch_ramp": [[0, 8], [100, 8]]}, 'key "batch_ramp": sequences must be at least 1'),
        ({"batch_ramp": [[0, 8], [100]]}, 'key "batch_ramp.1'),
        ({"batch_ramp": [[0, 0]]}, 'key "batch_ramp": sequences must be at least 1'),
        ({"scale_with_batch": True}, 'key "scale_with_batch": must be an object, { ... }, not true'),
        ({"scale_with_batch": {}}, 'key "scale_with_batch.reference_tokens": missing'),
        ({"scale_with_batch": {"reference_tokens": 0}}, 'key "scale_with_batch.reference_tokens": '),
        ({"scale_with_batch": {"reference_tokens": 9, "depth": 1}}, 'key "scale_with_batch.depth": unknown'),
        ({"scale_with_depth": {"reference_layers": 1.5}}, 'key "scale_with_depth.reference_layers": '),
        # The notebook's spellings.
        ({"use_amp": True, "precision": "fp32"}, 'keys "use_amp" and "precision": two spellings'),
        ({"schedule_learning_rate": True, "lr_schedule": "cosine"}, 'keys "schedule_learning_rate" and "lr_schedule"'),
        ({"minibatch_size": 1}, 'keys "minibatch_size" and "microbatch_size": two spellings'),
        ({"use_amp": 1}, 'key "use_amp": must be true or false'),
        ({"schedule_learning_rate": "true"}, 'key "schedule_learning_rate": must be true or false'),
        ({"schedule_learning_rate": None}, 'key "schedule_learning_rate": must be true or false'),
        ({"microbatch_size": ..., "minibatch_size": 0}, 'key "minibatch_size": '),
        ({"microbatch_size": ..., "minibatch_size": "6"}, 'key "minibatch_size": '),
    ],
    ids=str,
)
def test_impossible_combinations(train: WriteTrain, changes: dict[str, Any], words: str) -> None:
    message = refusal(train, **changes)
    assert words in message
    assert "secret" not in message


def test_all_defaults_spelled_out_are_no_keys_of_another_optimizer(train: WriteTrain) -> None:
    """A train.json with all defaults written out, as summaries and checkpoints record it, is accepted."""
    spelled = {
        key: value
        for key, value in defaults(TrainConfig).items()
        if key not in {*SEED_TRAIN, "gradient_accumulation_steps"}
    }
    assert train(**spelled | {"betas": [0.9, 0.999]}) == train()


# Batches, rules and schedules


def test_a_ramp_and_rules(train: WriteTrain) -> None:
    rules: dict[str, Any] = {
        "batch_ramp": [[0, 26], [1_000_000, 52]],
        "scale_with_batch": {"reference_tokens": 524_288, "reference_train_tokens": None},
        "scale_with_depth": {"reference_layers": 12},
    }
    config = train(**rules)
    assert {key: value for key, value in config.model_dump(mode="json").items() if key in rules} == rules
    assert (config.accumulation_steps(2), config.accumulation_steps(2, 26)) == (2, 1)
    with pytest.raises(UserError, match=r'"batch_ramp": 26 sequences are not a multiple of 13 .* x 4 \(ranks\) = 52'):
        config.accumulation_steps(4, 26)


def test_linear_ends_at_zero_unless_told_where(train: WriteTrain) -> None:
    """With "linear", `min_lr_ratio` is 0 unless train.json sets it, and the configuration records that 0."""
    assert train(lr_schedule="linear").model_dump()["min_lr_ratio"] == 0
    assert train(lr_schedule="linear", min_lr_ratio=0.2).min_lr_ratio == 0.2
    assert train(lr_schedule="cosine").min_lr_ratio == 0.1


# Upstream spellings


def test_keys_of_the_notebook_are_translated(train: WriteTrain) -> None:
    assert (train(use_amp=True).precision, train(use_amp=False).precision) == ("fp16", "fp32")
    assert train(microbatch_size=..., minibatch_size=6).microbatch_size == 6


def test_schedule_learning_rate(train: WriteTrain) -> None:
    """`schedule_learning_rate` is a cosine schedule. As in the notebook's program, it has a warm-up only if train.json
    gives its length."""
    config = train(schedule_learning_rate=True)
    assert (config.lr_schedule, config.min_lr_ratio) == ("cosine", 0.1)
    assert (config.warmup_period_percent, config.warmup_steps) == (None, None)
    schedule = build_schedule(config, 30_614, 1)
    assert (schedule.warmup_steps, schedule.multiplier(0)) == (0, 1.0)
    config = train(schedule_learning_rate=True, warmup_period_percent=2.5)
    assert (config.lr_schedule, config.warmup_period_percent) == ("cosine", 2.5)
    assert train(schedule_learning_rate=True, warmup_steps=7).warmup_steps == 7
    config = train(schedule_learning_rate=False, warmup_period_percent=5)
    assert (config.lr_schedule, config.warmup_period_percent) == ("constant", None)


def test_training_without_validation(train: WriteTrain) -> None:
    config = train(validation_interval=..., validation_batches=..., checkpoint_interval=100)
    assert (config.validates, config.checkpoint_every) == (False, 100)
    assert config.start_val_token == 50_000_000, "the notebook's later runs have only this one of the three keys"
    assert (train().validates, train().checkpoint_every) == (True, 617)
    assert train(checkpoint_interval=50).checkpoint_every == 50


# Batch arithmetic


def test_accumulation_steps(train: WriteTrain) -> None:
    for microbatch, batch, ranks, steps in (
        *((13, 104, 8, 1), (13, 104, 1, 8), (13, 104, 4, 2), (1, 1, 1, 1), (6, 96, 2, 8)),
        *((13, None, 1, 5), (13, None, 8, 5)),
    ):
        keys = {"gradient_accumulation_steps": 5} if batch is None else {"global_batch_size": batch}
        assert train(microbatch_size=microbatch, **keys).accumulation_steps(ranks) == steps
    assert train().accumulation_steps(8) == 1


def test_a_global_batch_that_does_not_divide(train: WriteTrain) -> None:
    for global_batch_size, world_size in ((104, 3), (105, 8), (13, 2), (1, 1)):
        message = refusal(train(global_batch_size=global_batch_size).accumulation_steps, world_size)
        assert f'"global_batch_size": {global_batch_size} sequences' in message
        assert f"13 (microbatch_size) x {world_size} (ranks) = {13 * world_size}" in message
