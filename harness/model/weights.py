"""The tensor names of published checkpoints of this model family, and the fused tensors that stand for them here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.common.errors import UserError
from harness.common.files import umask
from harness.common.memory import free_memory
from harness.common.units import GIB
from harness.model.config import ModelConfig
from harness.model.tensor_names import EMBEDDING, HEAD, TensorKind, check_tensors, public_names

PARTS = ("W_query", "W_key", "W_value")
FUSED = ".att.qkv."
WEIGHT_BYTES = 4  # fp32, made on the CPU first


def check_memory(config: ModelConfig) -> None:
    """Raises UserError if this machine cannot hold even the weights. To be called before the model is made: Linux
    overcommits memory, and the OOM killer gives no message."""
    needed = config.parameters * WEIGHT_BYTES
    if torch.get_default_device().type == "cpu" and needed > free_memory():
        raise UserError(
            f"model.json: {config.parameters:,} parameters take {needed / GIB:,.2f} GiB of memory, and "
            f"{free_memory() / GIB:,.2f} GiB are free; make the model smaller"
        )


def checkpoint_names(name: str) -> list[str]:
    """The names that a model's tensor has in checkpoints: a fused one is several there."""
    return [name.replace("qkv", part) for part in PARTS] if FUSED in name else [name]


def split_fused(name: str, tensor: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """A model's tensor by its names in checkpoints: views, nothing is copied."""
    sizes = config.query_width, config.kv_width, config.kv_width
    pieces = tensor.split(sizes) if FUSED in name else (tensor,)
    return dict(zip(checkpoint_names(name), pieces, strict=True))


def checkpoint_views(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """A model's state under the public names: views, nothing is copied."""
    views: dict[str, Tensor] = {}
    for name, tensor in state.items():
        views.update(split_fused(name, tensor.detach(), config))
    return views


def kinds_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorKind]:
    """Shapes and dtypes, as `check_tensors` compares them."""
    return {
        name: TensorKind(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in tensors.items()
    }


def from_checkpoint_names(offered: Mapping[str, Tensor], config: ModelConfig, source: Path) -> dict[str, Tensor]:
    """The tensors of a file by public name, checked against the model that `config` describes.

    `att.mask` buffers, the prefix of a wrapper around the model, and either half of a tied pair may be there or not.
    Raises UserError, naming `source` and what differs, if it is another model's file.
    """
    tensors = public_names(offered, tied=config.tie_weights)
    check_tensors(kinds_of(tensors), config.tensor_shapes(), source)
    if config.tie_weights and not torch.equal(tensors[HEAD], tensors[EMBEDDING]):
        raise UserError(f'{source}: not this model: "tie_weights" is true but out_head and tok_emb differ')
    return tensors


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises UserError if it is missing or damaged."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None


def save_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises SafetensorError or OSError."""
    save_file(tensors, path, metadata={"format": "pt"})
    os.chmod(path, 0o666 & ~umask())  # safetensors makes it 0600 whatever the umask
