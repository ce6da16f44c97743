"""Weights and shape of a model in the format of Hugging Face's native GPT-2, both ways; transformers is not needed.

Its Conv1D holds matrices as (in, out), ours lie as (out, in); its c_attn is query, key and value side by side, always
with biases. Format: transformers' GPT2Config and GPT2LMHeadModel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt import EPSILON, INIT_STD
from harness.common.errors import UserError
from harness.common.messages import abbreviated, quoted
from harness.model.config import ModelConfig
from harness.model.tensor_names import EMBEDDING, HEAD
from harness.model.weights import PARTS

PREFIX = "transformer."
PEER_HEAD = "lm_head.weight"
OUTER = {
    "tok_emb.weight": "wte.weight",
    "pos_emb.weight": "wpe.weight",
    "final_norm.scale": "ln_f.weight",
    "final_norm.shift": "ln_f.bias",
}
NORMS = {
    "norm1.scale": "ln_1.weight",
    "norm1.shift": "ln_1.bias",
    "norm2.scale": "ln_2.weight",
    "norm2.shift": "ln_2.bias",
}
PRODUCTS = {"att.out_proj": "attn.c_proj", "ff.layers.0": "mlp.c_fc", "ff.layers.2": "mlp.c_proj"}
ACTIVATIONS = {"gelu": "gelu_new", "relu2": "relu2"}
# What a config.json may change about GPT-2 that ours does not have, with the values that ours computes.
FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (EPSILON,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),  # another order of the same sums, in training only
    "add_cross_attention": (False,),
}


def to_config(shape: ModelConfig, eot_token: int, dtype: str) -> dict[str, Any]:
    """config.json for a model of this shape."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocab_size,
        "n_positions": shape.context_length,
        "n_embd": shape.emb_dim,
        "n_layer": shape.n_layers,
        "n_head": shape.n_heads,
        "n_inner": None if shape.mlp_width == 4 * shape.emb_dim else shape.mlp_width,
        "activation_function": ACTIVATIONS[shape.mlp],
        "layer_norm_epsilon": EPSILON,
        "resid_pdrop": shape.drop_rates.attention_output,  # and the feed-forward layer's, there
        "embd_pdrop": shape.drop_rates.embedding,
        "attn_pdrop": shape.drop_rates.attention_weights,
        "initializer_range": INIT_STD,
        "scale_attn_weights": True,
        "use_cache": True,
        "tie_word_embeddings": shape.tie_weights,
        "bos_token_id": eot_token,
        "eos_token_id": eot_token,
        "dtype": dtype,
    }


def to_tensors(ours: dict[str, Tensor], shape: ModelConfig) -> dict[str, Tensor]:
    """Our public tensors under GPT-2's names. Biases that ours lacks are zero; a tied head is left out."""
    theirs = {PREFIX + name: ours[own] for own, name in OUTER.items()}
    if not shape.tie_weights:
        theirs[PEER_HEAD] = ours[HEAD]
    for layer in range(shape.n_layers):
        block, there = f"trf_blocks.{layer}", f"{PREFIX}h.{layer}"
        qkv = [f"{block}.att.{part}" for part in PARTS]
        theirs[f"{there}.attn.c_attn.weight"] = torch.cat([ours[f"{name}.weight"].T for name in qkv], dim=1)
        theirs[f"{there}.attn.c_attn.bias"] = torch.cat([bias(ours, name) for name in qkv])
        for own, name in PRODUCTS.items():
            theirs[f"{there}.{name}.weight"] = ours[f"{block}.{own}.weight"].T.contiguous()
            theirs[f"{there}.{name}.bias"] = bias(ours, f"{block}.{own}")
        for own, name in NORMS.items():
            theirs[f"{there}.{name}"] = ours[f"{block}.{own}"]
    return theirs


def bias(ours: dict[str, Tensor], layer: str) -> Tensor:
    """A linear layer's bias; zeros if it has none."""
    weight = ours[f"{layer}.weight"]
    return ours.get(f"{layer}.bias", torch.zeros(len(weight), dtype=weight.dtype))


def from_config(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """model.json's keys for a config.json at `source`; `qkv_bias` is true, as there.

    Raises UserError, naming the key, if the model computes something that ours do not.
    """
    if config.get("model_type") != "gpt2":
        raise UserError(
            f'{source}: key "model_type": {quoted(config.get("model_type"))}; "gpt2" and "gpjtgpt2" can be imported'
        )
    for key, computed in FIXED.items():
        if config.get(key, computed[0]) not in computed:
            raise UserError(
                f'{source}: key "{key}": {quoted(config[key])} is not GPT-2 as we have it: {quoted(computed[0])}'
            )
    sizes = {
        "vocab_size": "vocab_size",
        "n_positions": "context_length",
        "n_embd": "emb_dim",
        "n_head": "n_heads",
        "n_layer": "n_layers",
    }
    for key in sizes:
        size = config.get(key)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            fault = f"{quoted(size)} is not a whole number from 1 on" if key in config else "missing"
            raise UserError(f'{source}: key "{key}": {fault}')
    if config["n_embd"] % config["n_head"]:
        raise UserError(f'{source}: key "n_embd": {config["n_embd"]} is not a multiple of n_head, {config["n_head"]}')
    inner = config.get("n_inner")
    if inner is not None and inner != 4 * config["n_embd"]:
        raise UserError(f'{source}: key "n_inner": {quoted(inner)} is not four times n_embd, as ours is')
    tied = config.get("tie_word_embeddings", True)
    if not isinstance(tied, bool):
        raise UserError(f'{source}: key "tie_word_embeddings": {quoted(tied)} is not true or false')
    shape = {own: config[key] for key, own in sizes.items()}
    return {**shape, "drop_rate": _drop_rate(config, source), "qkv_bias": True, "tie_weights": tied}


def _drop_rate(config: dict[str, Any], source: Path) -> float:
    """The one rate of all dropouts; where they differ, that of the residuals. It means nothing but for training on."""
    rates = [config.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    for key, rate in zip(("resid_pdrop", "embd_pdrop", "attn_pdrop"), rates, strict=True):
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
            raise UserError(f'{source}: key "{key}": {quoted(rate)} is not a rate of dropout')
    return float(rates[0])


def from_tensors(theirs: dict[str, Tensor], layers: int, source: Path) -> dict[str, Tensor]:
    """GPT-2's tensors under our public names, with or without the prefix `transformer.`; its masks are left out.

    Raises UserError, naming the tensor, if one is missing or of a shape that cannot be split.
    """
    offered = {name.removeprefix(PREFIX): tensor for name, tensor in theirs.items()}
    ours: dict[str, Tensor] = {}

    def take(name: str) -> Tensor:
        if name not in offered:
            raise UserError(f"{source}: not a GPT-2: tensor {name} is missing")
        return offered.pop(name)

    for own, name in OUTER.items():
        ours[own] = take(name)
    ours[HEAD] = offered.pop(PEER_HEAD, ours[EMBEDDING])
    for layer in range(layers):
        block, there = f"trf_blocks.{layer}", f"h.{layer}"
        weight, bias = take(f"{there}.attn.c_attn.weight"), take(f"{there}.attn.c_attn.bias")
        if weight.dim() != 2 or weight.shape[1] % 3 or bias.shape != weight.shape[1:]:
            raise UserError(f"{source}: not a GPT-2: tensor {there}.attn.c_attn.weight is {list(weight.shape)}")
        for part, matrix, vector in zip(PARTS, weight.chunk(3, dim=1), bias.chunk(3), strict=True):
            ours[f"{block}.att.{part}.weight"] = matrix.T.contiguous()
            ours[f"{block}.att.{part}.bias"] = vector.contiguous()
        for own, name in PRODUCTS.items():
            ours[f"{block}.{own}.weight"] = take(f"{there}.{name}.weight").T.contiguous()
            ours[f"{block}.{own}.bias"] = take(f"{there}.{name}.bias")
        for own, name in NORMS.items():
            ours[f"{block}.{own}"] = take(f"{there}.{name}")
    surplus = sorted(name for name in offered if not name.endswith((".attn.bias", ".attn.masked_bias")))
    if surplus:
        raise UserError(f"{source}: not a GPT-2: it also has {abbreviated(surplus, 2)}")
    return ours


def without_zero_biases(shape: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Remove the query, key and value biases if all of them are zero, as an export adds them."""
    biases = {name for name in tensors if name.endswith(tuple(f".att.{part}.bias" for part in PARTS))}
    if any(tensors[name].any() for name in biases):
        return shape, tensors
    return {**shape, "qkv_bias": False}, {name: tensor for name, tensor in tensors.items() if name not in biases}
