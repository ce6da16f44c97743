"""gpt.py: its logits, loss and gradients equal those of Hugging Face's GPT-2; sequence lengths, initial weights,
parameter counts and recomputed blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.references import transformers_peer
from gpt import GPTModel, ModelConfig, TransformerBlock


def shape(**changes: Any) -> ModelConfig:
    small = {
        "vocab_size": 97,
        "context_length": 24,
        "emb_dim": 48,
        "n_heads": 4,
        "n_layers": 3,
        "drop_rate": 0.0,
        "qkv_bias": False,
    }
    return ModelConfig.model_validate({**small, **changes})


def random_model(config: ModelConfig, *, recompute_blocks: bool = False) -> GPTModel:
    """Return a model with noise added to every tensor, so that no tensor is all 0 or all 1 and a wrong mapping of
    tensors changes the results."""
    torch.manual_seed(7)
    model = GPTModel(config, recompute_blocks=recompute_blocks)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def block_of(model: GPTModel, layer: int) -> TransformerBlock:
    block = model.trf_blocks[layer]
    assert isinstance(block, TransformerBlock)
    return block


def random_tokens(config: ModelConfig, batch: int = 2, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, config.context_length), generator=generator)


@pytest.mark.parametrize(
    ("attention", "tied", "qkv_bias"),
    [("eager", False, False), ("eager", True, True), ("sdpa", False, True), ("sdpa", True, False)],
)
def test_logits_loss_and_gradients_are_those_of_hugging_faces_gpt2(attention: str, tied: bool, qkv_bias: bool) -> None:
    config = shape(tie_weights=tied, qkv_bias=qkv_bias)
    model = random_model(config)
    peer = transformers_peer(model, attention)
    tokens, targets = random_tokens(config), random_tokens(config, seed=4)
    ours, theirs = model(tokens), peer(tokens).logits
    assert ours.dtype == torch.float32
    assert ours.shape == (2, config.context_length, config.vocab_size)
    assert theirs.abs().max() > 1, "logits near zero would agree even if they were wrong"
    assert (ours - theirs).abs().max() < 1e-5
    loss, expected = model(tokens, targets), F.cross_entropy(theirs.flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    grads = {name: parameter.grad for name, parameter in peer.named_parameters()}
    for layer in range(config.n_layers):
        qkv_gradient = grads[f"transformer.h.{layer}.attn.c_attn.weight"]
        assert qkv_gradient is not None
        actual = block_of(model, layer).att.qkv.weight.grad
        torch.testing.assert_close(actual, qkv_gradient.T, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(model.tok_emb.weight.grad, grads["transformer.wte.weight"], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "count", "active"),
    [
        ({}, 163_009_536, 163_009_536),
        ({"tie_weights": True, "qkv_bias": True}, 124_439_808, 124_439_808),
        # https://www.gilesthomas.com counts the active parameters without the router's rows of inactive experts.
        ({"moe": {"num_experts": 6, "num_active_experts": 2}}, 446_410_752, 219_697_152 + 12 * 4 * 768),
    ],
    ids=["the lab notebook's", "OpenAI's", "the lab notebook's first with experts"],
)
def test_parameters_of_gpt2_small(changes: dict[str, Any], count: int, active: int) -> None:
    config = shape(vocab_size=50257, context_length=1024, emb_dim=768, n_heads=12, n_layers=12, **changes)
    with torch.device("meta"):
        model = GPTModel(config)
    assert config.parameters == sum(parameter.numel() for parameter in model.parameters()) == count
    assert config.active_parameters == active


def test_recomputed_blocks_run_twice_in_training_and_once_without_gradients() -> None:
    model = random_model(shape(), recompute_blocks=True)
    calls: list[int] = []
    model.trf_blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    tokens = random_tokens(model.config)
    model(tokens, tokens).backward()
    assert len(calls) == 2
    with torch.no_grad():
        model(tokens)
    assert len(calls) == 3
