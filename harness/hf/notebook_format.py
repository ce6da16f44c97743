"""Models as the lab notebook's program has them: the ones that its author publishes, and files that its scripts load.

Its model is the book's (Raschka, Build a Large Language Model (From Scratch), chapter 4). On the Hugging Face Hub that
model lies in a wrapper (`GPJTGPT2Config`, `GPJTGPT2ModelForCausalLM` of github.com/gpjt/ddp-base-model-from-scratch,
hf_wrapper/): config.json holds model.json's object under "cfg", and every tensor's name begins with `model.`. The
wrapper's own code is never run: all that it does is to hand "cfg" to the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.common.errors import UserError
from harness.common.messages import quoted
from harness.model.config import ModelConfig
from harness.model.tensor_names import EMBEDDING, HEAD

MODEL_TYPE = "gpjtgpt2"
PREFIX = "model."
MASK = ".att.mask"
SIZES = ("vocab_size", "context_length", "emb_dim", "n_heads", "n_layers")
KEYS = (*SIZES, "drop_rate", "qkv_bias")
TIED, EXPERTS = "tie_weights", "moe"  # of later versions of its program
# What else its author's models have had, in words; LoRE is low-rank factors in place of the embedding or the head.
OTHERS = {"lore": "low-rank vocabulary matrices"}
LORE_SWITCHES = ("input_embeddings", "output_head")


def from_config(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """model.json's keys for a published model's config.json at `source`.

    Raises UserError, naming the key, if one is missing, or if the model computes something that ours do not.
    """
    shape = config.get("cfg")
    if not isinstance(shape, dict):
        raise UserError(f'{source}: key "cfg": {"missing" if shape is None else f"{quoted(shape)} is not an object"}')
    missing = [key for key in KEYS if key not in shape]
    if missing:
        raise UserError(f'{source}: key "cfg.{missing[0]}": missing')
    for key in SIZES:
        if not isinstance(shape[key], int) or isinstance(shape[key], bool) or shape[key] < 1:
            raise UserError(f'{source}: key "cfg.{key}": {quoted(shape[key])} is not a whole number from 1 on')
    known = {key: value for key, value in shape.items() if key in {*KEYS, TIED, EXPERTS}}
    for key in sorted(shape.keys() - known.keys()):
        _check_without_effect(key, shape[key], source)
    if config.get("tie_word_embeddings") is True and not shape.get(TIED):
        raise UserError(f'{source}: key "tie_word_embeddings": true, but key "cfg.{TIED}" does not say so')
    return known


def _check_without_effect(key: str, value: Any, source: Path) -> None:
    if key == "lore" and isinstance(value, dict) and not any(value.get(switch) for switch in LORE_SWITCHES):
        return  # the plain model, of an experiment that turned it off
    what = OTHERS.get(key, "something the notebook's models were not known to have")
    raise UserError(f'{source}: key "cfg.{key}": {what}; such a model cannot be imported')


def from_tensors(theirs: dict[str, Tensor], shape: dict[str, Any]) -> dict[str, Tensor]:
    """A published model's tensors under the public names, without its masks; of a tied pair both are there."""
    has_prefix = all(name.startswith(PREFIX) for name in theirs)
    bare = {name.removeprefix(PREFIX) if has_prefix else name: tensor for name, tensor in theirs.items()}
    ours = {name: tensor for name, tensor in bare.items() if not name.endswith(MASK)}
    if shape.get(TIED):
        for one, other in ((HEAD, EMBEDDING), (EMBEDDING, HEAD)):
            if one not in ours and other in ours:
                ours[one] = ours[other]
    return ours


def to_model_json(shape: ModelConfig) -> dict[str, Any]:
    """The notebook's model.json for a model of this shape.

    It never says "tie_weights": the program's `load_state_dict` wants a tied head in the file, its `load_model` (of
    safetensors, in later versions) refuses a tied model's file with both. As an untied model the two matrices load
    either way, and by the program's first versions, which had no such key.
    """
    experts = {EXPERTS: shape.moe.model_dump(exclude_none=True)} if shape.moe else {}  # a null is experts to it, too
    return {key: getattr(shape, key) for key in KEYS} | experts


def to_tensors(ours: dict[str, Tensor], shape: ModelConfig) -> dict[str, Tensor]:
    """Public tensors with the buffers that `load_state_dict` insists on: in each block the causal mask, (T, T), with
    ones above the diagonal, as the book's MultiHeadAttention registers it."""
    mask = torch.triu(torch.ones(shape.context_length, shape.context_length), diagonal=1)
    masks = {f"trf_blocks.{layer}{MASK}": mask for layer in range(shape.n_layers)}
    return {**ours, **masks}
