"""Hugging Face's GPT-2 with the weights of one of our models: the peer of the benchmarks and the truth of the tests."""

from __future__ import annotations

import transformers

from gpt import GPTModel, ModelConfig
from harness.hf.gpt2_format import PEER_HEAD, PREFIX, to_config, to_tensors


def peer_config(config: ModelConfig, attention: str = "sdpa") -> transformers.GPT2Config:
    """Configuration of the same shape and dropout in transformers' terms; `attention` is its attn_implementation."""
    settings = {**to_config(config, 0, "float32"), "bos_token_id": None, "eos_token_id": None}
    del settings["model_type"], settings["architectures"]
    return transformers.GPT2Config(**settings | {"attn_implementation": attention})


def peer_of(model: GPTModel, attention: str = "sdpa") -> transformers.GPT2LMHeadModel:
    """A transformers model on the CPU, in training mode, with the weights of `model`.

    Where `model` has no query, key and value biases, the peer's (it always has them) are zero.
    """
    peer = transformers.GPT2LMHeadModel(peer_config(model.config, attention))
    tensors = to_tensors(model.to_checkpoint_names(), model.config)
    peer.load_state_dict({PEER_HEAD: tensors[f"{PREFIX}wte.weight"], **tensors})
    peer.loss_type = "ForCausalLM"
    peer.train()
    return peer
