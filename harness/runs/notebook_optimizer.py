"""The optimizer's state in checkpoints of the lab notebook's program.

They hold model.safetensors, optimizer.pt (AdamW's state dict), scaler.pt, and a meta.json, of which
harness/runs/checkpoint_lookup.py knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.model.config import ModelConfig
from harness.model.weights import checkpoint_names, split_fused

# The order of a block's parameters there, which is that of the book's classes: these, the feed-forward layer's (or the
# router's and then each expert's, as here), and the norms.
ATTENTION_ORDER = ("att.W_query", "att.W_key", "att.W_value", "att.out_proj")
NORM_ORDER = ("norm1", "norm2")


def optimizer_by_name(
    saved: dict[str, Any], shapes: dict[str, dict[str, torch.Size]], config: ModelConfig
) -> dict[str, dict[str, Tensor]]:
    """A notebook's optimizer state, numbered by its order of parameters, as one of `shapes`: by our own parameters'
    names, what the run's optimizer keeps of each, in fp32.

    Raises KeyError, TypeError, ValueError, AttributeError or RuntimeError if it is another model's or optimizer's, or
    something else.
    """
    wanted = _shapes_in_checkpoints(shapes, config)
    names = _notebook_order(list(wanted), tied=config.tie_weights)
    numbered = saved["state"]
    if sorted(numbered) != list(range(len(names))):
        raise ValueError(f"the state is one of {len(numbered)} parameters, the model has {len(names)}")
    found = {name: numbered[index] for index, name in enumerate(names)}
    for name, state in found.items():
        for key, shape in wanted[name].items():
            if state[key].shape != shape:
                raise ValueError(f"{key} of {name} is {list(state[key].shape)}, not {list(shape)}")
    return {name: _fused([found[part] for part in checkpoint_names(name)], shapes[name]) for name in shapes}


def _shapes_in_checkpoints(
    shapes: dict[str, dict[str, torch.Size]], config: ModelConfig
) -> dict[str, dict[str, torch.Size]]:
    """The shapes of all that is cut where a fused parameter is, by the names that parameters have in checkpoints."""
    cut: dict[str, dict[str, torch.Size]] = {part: {} for name in shapes for part in checkpoint_names(name)}
    for name, state in shapes.items():
        for key, shape in state.items():
            if shape:  # a number is not cut
                pieces = split_fused(name, torch.empty(shape, device="meta"), config)
                for part, piece in pieces.items():
                    cut[part][key] = piece.shape
    return cut


def _fused(parts: list[dict[str, Any]], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """One of our parameters' state: a fused one's is that of its parts together, whose numbers are the same."""
    return {
        key: torch.cat([part[key].float() for part in parts])
        if shape
        else torch.as_tensor(parts[0][key], dtype=torch.float32).reshape(())
        for key, shape in shapes.items()
    }


def _notebook_order(names: list[str], *, tied: bool) -> list[str]:
    """Embeddings, the blocks, the final norm and the head; a module's weight before its bias, scale before shift."""
    blocks = sorted({int(name.split(".")[1]) for name in names if name.startswith("trf_blocks.")})
    modules = ["tok_emb", "pos_emb"]
    for block in blocks:
        prefix = f"trf_blocks.{block}"
        modules += [f"{prefix}.{module}" for module in ATTENTION_ORDER]
        modules += dict.fromkeys(name.rpartition(".")[0] for name in names if name.startswith(f"{prefix}.ff."))
        modules += [f"{prefix}.{module}" for module in NORM_ORDER]
    modules += ["final_norm"] if tied else ["final_norm", "out_head"]
    parts = ("weight", "bias", "scale", "shift")
    return [f"{module}.{part}" for module in modules for part in parts if f"{module}.{part}" in set(names)]
