"""Keys of other programs in train.json or model.json: the error message names this program's key for the same
setting."""

from __future__ import annotations

import re

import pytest

from harness.common.json_files import RunFile
from harness.common.other_names import COUNTERPARTS, WITHOUT_KEY
from harness.model.config import ModelConfig
from harness.runs.train_config import TrainConfig
from tests.support.configs import WriteModel, WriteTrain, refusal

# Keys of nanoGPT and transformers, and this program's keys for the same settings, by those programs' documentation.
FOREIGN = [
    ("train.json", "batch_size", "microbatch_size"),
    ("train.json", "max_iters", "train_steps"),
    ("train.json", "min_lr", "min_lr_ratio"),
    ("train.json", "bf16", "precision"),
    ("model.json", "n_embd", "emb_dim"),
    ("model.json", "dropout", "drop_rate"),
    ("model.json", "bias", "qkv_bias"),
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
    assert "in tokens; -1: all of the split once" in refusal(train, num_train_epochs=1)
    assert "over learning_rate" in refusal(train, min_lr=6e-5)
    assert "times 100" in refusal(train, warmup_ratio=0.05)


def test_a_key_under_another_programs_name_is_not_missing_besides(train: WriteTrain, model: WriteModel) -> None:
    assert "missing" not in refusal(train, microbatch_size=..., batch_size=12)
    assert "missing" not in refusal(model, emb_dim=..., n_embd=768)


def test_advice_leads_to_keys_that_there_are() -> None:
    kinds: dict[str, type[RunFile]] = {"train.json": TrainConfig, "model.json": ModelConfig}
    fields = {*TrainConfig.model_fields, *ModelConfig.model_fields}
    for file, names in COUNTERPARTS.items():
        assert {ours for ours, _ in names.values()} <= kinds[file].model_fields.keys()
        assert not names.keys() & (fields | WITHOUT_KEY.keys())
    assert not fields & WITHOUT_KEY.keys()


def test_a_mixture_of_experts_is_that_of_the_notebook(train: WriteTrain, model: WriteModel) -> None:
    """A mixture of experts is set as in the notebook's newest runs: `moe` in model.json, and the factor of the router's
    loss in train.json. The message on another program's key suggests `moe`."""
    moe = model(moe={"num_experts": 6, "num_active_experts": 2}).moe
    assert moe is not None
    assert (moe.num_experts, moe.num_active_experts) == (6, 2)
    assert train(moe_router_loss_scale=0.005).moe_router_loss_scale == 0.005
    says = 'did you mean "moe" (an object of num_experts and num_active_experts)?'
    assert f'key "num_local_experts": unknown; {says}' in refusal(model, num_local_experts=8)
