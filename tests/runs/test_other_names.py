"""Names that other programs give their settings: where such a key in train.json or model.json leads to."""

from __future__ import annotations

import re

import pytest

from harness.common.json_files import RunFile
from harness.common.other_names import COUNTERPARTS, WITHOUT_KEY
from harness.model.config import ModelConfig
from harness.runs.train_config import TrainConfig
from tests.support.configs import WriteModel, WriteTrain, refusal

# Keys of nanoGPT and transformers, and what each is here: by those programs' own documentation.
FOREIGN_TRAIN = {
    "batch_size": "microbatch_size",
    "per_device_train_batch_size": "microbatch_size",
    "max_iters": "train_steps",
    "num_train_epochs": "min_train_tokens",
    "max_steps": "train_steps",
    "warmup_iters": "warmup_steps",
    "warmup_ratio": "warmup_period_percent",
    "min_lr": "min_lr_ratio",
    "lr_scheduler_type": "lr_schedule",
    "grad_clip": "clipping_max_norm",
    "max_grad_norm": "clipping_max_norm",
    "beta1": "betas",
    "beta2": "betas",
    "adam_beta1": "betas",
    "adam_epsilon": "eps",
    "dtype": "precision",
    "fp16": "precision",
    "bf16": "precision",
    "gradient_checkpointing": "activation_checkpointing",
    "seed": "random_seed",
    "eval_interval": "validation_interval",
    "eval_steps": "validation_interval",
    "eval_iters": "validation_batches",
    "log_interval": "report_interval",
    "logging_steps": "report_interval",
    "save_steps": "checkpoint_interval",
}
FOREIGN_MODEL = {
    "block_size": "context_length",
    "n_positions": "context_length",
    "n_ctx": "context_length",
    "max_position_embeddings": "context_length",
    "n_embd": "emb_dim",
    "hidden_size": "emb_dim",
    "n_head": "n_heads",
    "num_attention_heads": "n_heads",
    "n_layer": "n_layers",
    "num_hidden_layers": "n_layers",
    "dropout": "drop_rate",
    "bias": "qkv_bias",
    "tie_word_embeddings": "tie_weights",
    "intermediate_size": "mlp_dim",
    "rope_theta": "rope_base",
    "hidden_act": "mlp",
}


@pytest.mark.parametrize("name", FOREIGN_TRAIN)
def test_other_programs_training_keys_lead_to_ours(train: WriteTrain, model: WriteModel, name: str) -> None:
    ours = FOREIGN_TRAIN[name]
    assert re.search(rf'key "{name}": unknown; did you mean "{ours}"( \(.+\))?\?$', refusal(train, **{name: 1}))
    assert f'key "{name}": unknown; did you mean "{ours}" in train.json' in refusal(model, **{name: 1})


@pytest.mark.parametrize("name", FOREIGN_MODEL)
def test_other_programs_model_keys_lead_to_ours(train: WriteTrain, model: WriteModel, name: str) -> None:
    ours = FOREIGN_MODEL[name]
    assert re.search(rf'key "{name}": unknown; did you mean "{ours}"( \(.+\))?\?$', refusal(model, **{name: 1}))
    assert f'key "{name}": unknown; did you mean "{ours}" in model.json' in refusal(train, **{name: 1})


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
    assert "in tokens; -1: all of the split once" in refusal(train, num_train_epochs=1)
    assert "over learning_rate" in refusal(train, min_lr=6e-5)
    assert "times 100" in refusal(train, warmup_ratio=0.05)


def test_a_key_under_another_programs_name_is_not_missing_besides(train: WriteTrain, model: WriteModel) -> None:
    assert "missing" not in refusal(train, microbatch_size=..., batch_size=12)
    assert "missing" not in refusal(model, emb_dim=..., n_embd=768)


def test_advice_leads_to_keys_that_there_are() -> None:
    kinds: dict[str, type[RunFile]] = {"train.json": TrainConfig, "model.json": ModelConfig}
    for name, ours in COUNTERPARTS.items():
        assert ours.key in kinds[ours.file].model_fields, name
        assert name not in {**TrainConfig.model_fields, **ModelConfig.model_fields}, f"{name} is a key of ours"
    assert not COUNTERPARTS.keys() & WITHOUT_KEY.keys()
    assert not {*TrainConfig.model_fields, *ModelConfig.model_fields} & WITHOUT_KEY.keys()


def test_a_mixture_of_experts_is_that_of_the_notebook(train: WriteTrain, model: WriteModel) -> None:
    """Its newest runs: `moe` in model.json, the weight of the router's loss in train.json. Others' keys lead there."""
    moe = model(moe={"num_experts": 6, "num_active_experts": 2}).moe
    assert moe is not None
    assert (moe.num_experts, moe.num_active_experts) == (6, 2)
    assert train(moe_router_loss_scale=0.005).moe_router_loss_scale == 0.005
    says = 'did you mean "moe" (an object of num_experts and num_active_experts)?'
    assert f'key "num_local_experts": unknown; {says}' in refusal(model, num_local_experts=8)
