"""Weights and shape of a model in the formats of Hugging Face's Llama and Qwen 3; transformers is not needed.

The two differ by what is done to queries and keys: Qwen 3's are normalised, head by head, before they are turned.
Format: transformers' LlamaConfig, LlamaForCausalLM, Qwen3Config and Qwen3ForCausalLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpt import EPSILON, INIT_STD
from harness.hf.gpt2_format import bias
from harness.model.config import ModelConfig
from harness.model.tensor_names import EMBEDDING, HEAD

PEER_HEAD = "lm_head.weight"
LINEAR = {
    "att.W_query": "self_attn.q_proj",
    "att.W_key": "self_attn.k_proj",
    "att.W_value": "self_attn.v_proj",
    "att.out_proj": "self_attn.o_proj",
    "ff.gate": "mlp.gate_proj",
    "ff.layers.0": "mlp.up_proj",
    "ff.layers.2": "mlp.down_proj",
}
NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
HEAD_NORMS = {"att.q_norm": "self_attn.q_norm", "att.k_norm": "self_attn.k_norm"}


def to_config(shape: ModelConfig, eot_token: int, dtype: str) -> dict[str, Any]:
    """config.json for a model of this shape. `attention_bias` is of all four projections; biases
    that ours lacks are then zero."""
    config = {
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
        "hidden_size": shape.emb_dim,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads or shape.n_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": shape.rope_base,  # transformers before version 5
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base},
        "attention_bias": shape.linear_bias,
        "attention_dropout": shape.drop_rates.attention_weights,
        "initializer_range": INIT_STD,
        "use_cache": True,
        "tie_word_embeddings": shape.tie_weights,
        "bos_token_id": eot_token,
        "eos_token_id": eot_token,
        "dtype": dtype,
    }
    return config | ({"use_sliding_window": False} if shape.qk_norm else {"mlp_bias": shape.linear_bias})


def to_tensors(ours: dict[str, Tensor], shape: ModelConfig) -> dict[str, Tensor]:
    """Our public tensors under these classes' names. Gains that ours lacks are ones, biases zero; a tied head is left
    out."""
    ones = torch.ones(shape.emb_dim)
    theirs = {"model.embed_tokens.weight": ours[EMBEDDING], "model.norm.weight": ours.get("final_norm.scale", ones)}
    if not shape.tie_weights:
        theirs[PEER_HEAD] = ours[HEAD]
    for layer in range(shape.n_layers):
        block, there = f"trf_blocks.{layer}", f"model.layers.{layer}"
        for own, name in LINEAR.items():
            theirs[f"{there}.{name}.weight"] = ours[f"{block}.{own}.weight"]
            if shape.linear_bias:
                theirs[f"{there}.{name}.bias"] = bias(ours, f"{block}.{own}")
        for own, name in NORMS.items():
            theirs[f"{there}.{name}.weight"] = ours.get(f"{block}.{own}.scale", ones)
        for own, name in HEAD_NORMS.items() if shape.qk_norm else ():
            theirs[f"{there}.{name}.weight"] = ours.get(f"{block}.{own}.scale", torch.ones(shape.head_width))
    return {name: tensor.clone() for name, tensor in theirs.items()}
