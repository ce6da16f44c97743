"""Hugging Face's GPT-2 with the weights of one of our models: the peer of the benchmarks and the truth of the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from gpt import GPTModel, ModelConfig


def peer_config(config: ModelConfig, attention: str = "sdpa") -> GPT2Config:
    """The same shape and dropout in transformers' terms; `attention` is its attn_implementation."""
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "n_positions": config.context_length,
        "n_embd": config.emb_dim,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "resid_pdrop": config.drop_rate,
        "embd_pdrop": config.drop_rate,
        "attn_pdrop": config.drop_rate,
        "tie_word_embeddings": config.tie_weights,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": attention,
    }
    return GPT2Config(**settings)


def peer_of(model: GPTModel, attention: str = "sdpa") -> GPT2LMHeadModel:
    """A transformers model on the CPU, in training mode, with the weights of `model`.

    Where `model` has no query, key and value biases, the peer's (it always has them) are zero.
    """
    peer = GPT2LMHeadModel(peer_config(model.config, attention))
    peer.load_state_dict(peer_tensors(model.public_tensors(), model.config))
    peer.loss_type = "ForCausalLM"
    peer.train()
    return peer


def peer_tensors(ours: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our public tensors under transformers' names. Its Conv1D holds weights as (in, out), so matrices are transposed;
    its c_attn is query, key and value side by side."""
    theirs = {
        "transformer.wte.weight": ours["tok_emb.weight"],
        "transformer.wpe.weight": ours["pos_emb.weight"],
        "transformer.ln_f.weight": ours["final_norm.scale"],
        "transformer.ln_f.bias": ours["final_norm.shift"],
        "lm_head.weight": ours["out_head.weight"],
    }
    for layer in range(config.n_layers):
        block, there = f"trf_blocks.{layer}", f"transformer.h.{layer}"
        qkv = [f"{block}.att.{part}" for part in ("W_query", "W_key", "W_value")]
        theirs[f"{there}.attn.c_attn.weight"] = torch.cat([ours[f"{name}.weight"].T for name in qkv], dim=1)
        no_bias = torch.zeros(config.emb_dim)
        theirs[f"{there}.attn.c_attn.bias"] = torch.cat([ours.get(f"{name}.bias", no_bias) for name in qkv])
        for name, peer_name in (
            ("att.out_proj", "attn.c_proj"),
            ("ff.layers.0", "mlp.c_fc"),
            ("ff.layers.2", "mlp.c_proj"),
        ):
            theirs[f"{there}.{peer_name}.weight"] = ours[f"{block}.{name}.weight"].T
            theirs[f"{there}.{peer_name}.bias"] = ours[f"{block}.{name}.bias"]
        for number in (1, 2):
            theirs[f"{there}.ln_{number}.weight"] = ours[f"{block}.norm{number}.scale"]
            theirs[f"{there}.ln_{number}.bias"] = ours[f"{block}.norm{number}.shift"]
    return theirs
