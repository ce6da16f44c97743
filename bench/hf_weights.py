"""Hugging Face's GPT-2 with the weights of one of our models: the peer of the benchmarks and the truth of the tests."""

from __future__ import annotations

import transformers

from gpt import GPTModel, ModelConfig
from harness.hf.formats import GPT2_PREFIX, PEER_HEAD, common_config, gpt2_config, gpt2_tensors


def peer_config(config: ModelConfig, attention: str = "sdpa") -> transformers.GPT2Config:
    """Configuration of the same shape and dropout in transformers' terms; `attention` is its attn_implementation."""
    settings = {
        **gpt2_config(config),
        **common_config(config, 0, "float32"),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    del settings["model_type"], settings["architectures"]
    return transformers.GPT2Config(**settings | {"attn_implementation": attention})


def peer_of(model: GPTModel, attention: str = "sdpa") -> transformers.GPT2LMHeadModel:
    """A transformers model on the CPU, in training mode, with the weights of `model`.

    Where `model` has no query, key and value biases, the peer's (it always has them) are zero.
    """
    peer = transformers.GPT2LMHeadModel(peer_config(model.config, attention))
    tensors = gpt2_tensors(model)
    peer.load_state_dict({PEER_HEAD: tensors[f"{GPT2_PREFIX}wte.weight"], **tensors})
    peer.loss_type = "ForCausalLM"
    peer.train()
    return peer
