"""model.json: sizes, depth, options of the architecture and experts, accepted and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.model.config import ModelConfig, load_model_config
from tests.runs.test_config import defaults
from tests.support.configs import WriteModel, refusal


@pytest.mark.parametrize("given", [{}, {"drop_rate": 0.2, "qkv_bias": True}], ids=str)
def test_depth_form(tmp_path: Path, given: dict[str, Any]) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"depth": 4, "vocab_size": 500, "context_length": 128, **given}))
    sizes = {"vocab_size": 500, "context_length": 128, "emb_dim": 256, "n_heads": 4, "n_layers": 4}
    without = {"drop_rate": 0.0, "qkv_bias": False}
    assert load_model_config(path).model_dump() == {**sizes, **without, **defaults(ModelConfig), **given}


def test_depth_and_what_it_decides(model: WriteModel) -> None:
    for key in ("n_layers", "n_heads", "emb_dim"):
        sizes = {name: ... for name in ("n_layers", "n_heads", "emb_dim") if name != key}
        message = refusal(model, depth=12, **sizes)
        assert '"depth"' in message
        assert f'"{key}"' in message


NO_SIZES = [True, "1", 1.5, 0, -1]
SIZES = ("vocab_size", "context_length", "emb_dim", "n_heads", "n_layers", "n_kv_heads")


@pytest.mark.parametrize("key", [*SIZES, "drop_rate", "depth"])
def test_impossible_values_of_model_json(model: WriteModel, key: str) -> None:
    others = dict.fromkeys(("n_layers", "n_heads", "emb_dim"), ...) if key == "depth" else {}
    for value in [-0.1, 1, 1.0, True, "0.1"] if key == "drop_rate" else [*NO_SIZES, *([12.0, None] * (key == "depth"))]:
        assert f'key "{key}": ' in refusal(model, **{key: value}, **others)


@pytest.mark.parametrize(
    ("changes", "key", "remedy"),
    [
        ({"emb_dim": 770}, "emb_dim", "is not a multiple of n_heads (12)"),
        ({"n_kv_heads": 5}, "n_kv_heads", "does not divide n_heads (12); use a divisor"),
        ({"position": "rope", "head_dim": 63}, "position", "make head_dim even"),
        ({"position": "rope", "emb_dim": 780}, "position", "make head_dim even"),
        ({"rope_base": 10_000.0}, "rope_base", 'belongs with "position": "rope"; remove it'),
        ({"position": "rope", "rope_base": 1.0}, "rope_base", "greater than 1"),
        ({"norm_gain": False}, "norm_gain", 'belongs with "norm": "rmsnorm"'),
        ({"logit_softcap": 0}, "logit_softcap", "greater than or equal to 0.01"),
        ({"logit_softcap": 1e308}, "logit_softcap", "less than or equal to 10000"),
        ({"logit_softcap": 1e-300}, "logit_softcap", "greater than or equal to 0.01, not 1e-300; null switches it off"),
        ({"mlp_dim": 10**12}, "mlp_dim", "the limit is 10,000,000,000,000"),
        ({"bigram_embedding": 10**12}, "bigram_embedding", "the limit is 10,000,000,000,000"),
        ({"linear_bias": False, "qkv_bias": True}, "linear_bias", "set qkv_bias to false"),
        ({"mlp_dim": 0}, "mlp_dim", "greater than or equal to 1"),
        ({"head_dim": 0}, "head_dim", "greater than or equal to 1"),
        ({"bigram_embedding": 1}, "bigram_embedding", "greater than or equal to 2"),
        ({"value_embeddings": 0}, "value_embeddings", "greater than or equal to 1"),
        ({"value_embeddings": True}, "value_embeddings", "valid integer"),
        ({"value_embeddings": 7}, "value_embeddings", "7 blocks, or at least 14, and n_layers is 12"),
        ({"n_layers": 1, "value_embeddings": 2}, "value_embeddings", "and n_layers is 1; change one of them"),
        ({"initialisation": "zero"}, "initialisation", "'gpt2' or 'zero_residual'"),
        ({"mlp": "geglu"}, "mlp", "'swiglu'"),
        ({"drop_rate": {"attention": 0.1}}, "drop_rate.attention", "unknown; remove it"),
        ({"drop_rate": {"embedding": 1.0}}, "drop_rate.embedding", "less than 1"),
        ({"drop_rate": [0.1]}, "drop_rate", "valid number"),
        ({"moe": {"num_experts": 8, "num_active_experts": 9}}, "moe.num_active_experts", "lower it to 8 at most"),
        ({"moe": {"num_experts": 8, "num_active_experts": 1}}, "moe.num_active_experts", "equal to 2, not 1"),
        ({"moe": {"num_experts": 8, "num_active_experts": 2.0}}, "moe.num_active_experts", "valid integer, not 2.0"),
        ({"moe": {"num_experts": 1, "num_active_experts": 1}}, "moe.num_experts", "equal to 2, not 1"),
        ({"moe": {"num_experts": True, "num_active_experts": 2}}, "moe.num_experts", "valid integer, not true"),
        ({"moe": {"num_experts": 2048, "num_active_experts": 2}}, "moe.num_experts", "less than or equal to 1024"),
        ({"moe": {"num_experts": 8}}, "moe.num_active_experts", "missing"),
        ({"moe": {"num_experts": 8, "num_active_experts": 2, "top_k": 2}}, "moe.top_k", "unknown; remove it"),
        ({"moe": 8}, "moe", "must be an object, { ... }, not 8; null switches it off"),
    ],
    ids=str,
)
def test_impossible_levers_are_refused_with_the_remedy(
    model: WriteModel, changes: dict[str, Any], key: str, remedy: str
) -> None:
    message = refusal(model, **changes)
    assert f'"{key}"' in message
    assert remedy in message


def test_dropout_has_four_places_together_or_apart(model: WriteModel) -> None:
    assert set(model(drop_rate=0.25).drop_rates.model_dump().values()) == {0.25}
    apart = model(drop_rate={"embedding": 0.1, "mlp_output": 0.2})
    assert list(apart.drop_rates.model_dump().values()) == [0.1, 0.0, 0.0, 0.2]
    assert model(drop_rate=apart.model_dump()["drop_rate"]) == apart, "the form in a checkpoint must be accepted"


def test_what_belongs_to_a_lever_is_spelt_out(model: WriteModel) -> None:
    assert model(position="rope").rope_base == 10_000
    assert model(norm="rmsnorm").norm_gain is True
    assert model(qk_norm=True).norm_gain is True
    assert (model().rope_base, model().norm_gain) == (None, None)


def test_the_first_blocks_and_the_last_share_value_embeddings(model: WriteModel) -> None:
    for layers, count, tables in (
        *((5, 2, [0, 1, None, 0, 1]), (2, 1, [0, 0])),
        *((3, 3, [0, 1, 2]), (3, None, [None, None, None])),
    ):
        config = model(n_layers=layers, value_embeddings=count)
        assert [config.value_embedding_of(layer) for layer in range(layers)] == tables


def test_width_of_the_feed_forward_layer(model: WriteModel) -> None:
    assert model().mlp_width == 3072
    assert model(mlp="swiglu").mlp_width == 2048
    assert model(mlp="swiglu", emb_dim=132).mlp_width == 352
    assert model(mlp_dim=5).mlp_width == 5
