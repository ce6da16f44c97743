"""Fused tensors and their parts: cut where the model's configuration says, whatever the numbers of heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpt import GPTModel
from harness.common.errors import UserError
from harness.model.config import ModelConfig
from harness.model.weights import (
    PARTS,
    checkpoint_names,
    checkpoint_views,
    from_checkpoint_names,
    load_into,
    load_weights,
    qkv_sizes,
    save_weights,
    split_fused,
)

SOURCE = Path("other/model.safetensors")
ATTENTION = "trf_blocks.0.att"


def shape(n_heads: int, n_kv_heads: int | None) -> ModelConfig:
    """Heads of 4."""
    return ModelConfig(
        vocab_size=11,
        context_length=5,
        emb_dim=4 * n_heads,
        n_heads=n_heads,
        n_layers=2,
        drop_rate=0.0,
        qkv_bias=True,
        n_kv_heads=n_kv_heads,
    )


def state_of(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """A state with the model's own names, fused tensors of the sizes that `config` asks for, and random values."""
    generator, rows = torch.Generator().manual_seed(seed), sum(qkv_sizes(config))
    state = {name: tensor.shape for name, tensor in GPTModel(config).state_dict().items()}
    for name in state:
        if ".qkv." in name:
            state[name] = torch.Size((rows, *state[name][1:]))
    return {name: torch.randn(size, generator=generator) for name, size in state.items()}


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "sizes"),
    [
        (4, None, (16, 16, 16)),
        (4, 4, (16, 16, 16)),
        (4, 2, (16, 8, 8)),
        (4, 1, (16, 4, 4)),
        (6, 3, (24, 12, 12)),
        (1, None, (4, 4, 4)),
    ],
)
def test_a_round_trip_is_exact_for_any_number_of_key_value_heads(
    n_heads: int, n_kv_heads: int | None, sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    config = shape(n_heads, n_kv_heads)
    assert qkv_sizes(config) == sizes
    state = state_of(config)
    views = checkpoint_views(state, config)
    for part, size in zip(("W_query", "W_key", "W_value"), sizes, strict=True):
        assert views[f"{ATTENTION}.{part}.weight"].shape == (size, config.emb_dim)
        assert views[f"{ATTENTION}.{part}.bias"].shape == (size,)
    save_weights({name: tensor.contiguous() for name, tensor in views.items()}, tmp_path / "w.safetensors")
    other = state_of(config, seed=1)
    read = load_weights(tmp_path / "w.safetensors")
    load_into(other, from_checkpoint_names(read, other, config, SOURCE), config)
    assert other.keys() == state.keys()
    assert all(torch.equal(other[name], state[name]) for name in state)


def test_a_file_of_another_number_of_key_value_heads_is_refused() -> None:
    offered = checkpoint_views(state_of(shape(4, 2)), shape(4, 2))
    with pytest.raises(UserError, match=r"W_key.weight is \[8, 16\] in the file, \[16, 16\] in model.json"):
        from_checkpoint_names(offered, state_of(shape(4, 4)), shape(4, 4), SOURCE)


def test_parts_are_views_in_the_order_query_key_value() -> None:
    config, name = shape(4, 2), f"{ATTENTION}.qkv.weight"
    fused = torch.randn(32, 16)
    parts = split_fused(name, fused, config)
    assert list(parts) == checkpoint_names(name) == [f"{ATTENTION}.{part}.weight" for part in PARTS]
    assert torch.equal(torch.cat(list(parts.values())), fused)
    assert {part.untyped_storage().data_ptr() for part in parts.values()} == {fused.untyped_storage().data_ptr()}
    assert list(split_fused("tok_emb.weight", fused, config)) == ["tok_emb.weight"]
    assert split_fused("tok_emb.weight", fused, config)["tok_emb.weight"] is fused


def test_a_fused_tensor_that_the_configuration_does_not_explain_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        split_fused(f"{ATTENTION}.qkv.weight", torch.randn(48, 16), shape(4, 2))
