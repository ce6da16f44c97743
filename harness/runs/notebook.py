"""The optimizer's state in checkpoints of the lab notebook's program.

They hold model.safetensors, optimizer.pt (AdamW's state dict), scaler.pt, and a meta.json, of which
harness/runs/checkpoint_folder.py knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.model.weights import FUSED, HEAD, PARTS, checkpoint_views

# The order of a block's parameters there, which is that of the book's classes.
BLOCK_ORDER = (
    "att.W_query",
    "att.W_key",
    "att.W_value",
    "att.out_proj",
    "ff.layers.0",
    "ff.layers.2",
    "norm1",
    "norm2",
)
MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_by_name(saved: dict[str, Any], state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """AdamW's state, numbered by the notebook's order of parameters, by our own parameters' names.

    `state` is the model's own. Raises KeyError, TypeError, ValueError, AttributeError or RuntimeError if it is another
    model's, or something else.
    """
    shapes = {name: tensor.shape for name, tensor in checkpoint_views(state).items()}
    names = _notebook_order(list(shapes), tied=state[HEAD].data_ptr() == state["tok_emb.weight"].data_ptr())
    numbered = saved["state"]
    if sorted(numbered) != list(range(len(names))):
        raise ValueError(f"the state is one of {len(numbered)} parameters, the model has {len(names)}")
    public = {name: numbered[index] for index, name in enumerate(names)}
    for name, moments in public.items():
        for moment in MOMENTS:
            if moments[moment].shape != shapes[name]:
                raise ValueError(f"{moment} of {name} is {list(moments[moment].shape)}, not {list(shapes[name])}")
    return {name: _fused(public, name) for name in state if name in public or FUSED in name}


def _fused(public: dict[str, dict[str, Tensor]], name: str) -> dict[str, Tensor]:
    """One of our parameters' state: a fused one's is that of its parts together."""
    parts = [public[name.replace("qkv", part)] for part in PARTS] if FUSED in name else [public[name]]
    step = torch.as_tensor(parts[0]["step"], dtype=torch.float32).reshape(())
    return {"step": step, **{moment: torch.cat([part[moment].float() for part in parts]) for moment in MOMENTS}}


def _notebook_order(names: list[str], *, tied: bool) -> list[str]:
    """Embeddings, the blocks, the final norm and the head; a module's weight before its bias, scale before shift."""
    blocks = sorted({int(name.split(".")[1]) for name in names if name.startswith("trf_blocks.")})
    modules = ["tok_emb", "pos_emb"]
    modules += [f"trf_blocks.{block}.{module}" for block in blocks for module in BLOCK_ORDER]
    modules += ["final_norm"] if tied else ["final_norm", "out_head"]
    parts = ("weight", "bias", "scale", "shift")
    return [f"{module}.{part}" for module in modules for part in parts if f"{module}.{part}" in set(names)]
