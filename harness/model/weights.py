"""Weights files, and conversion between the tensors of checkpoints and the model's tensors, some of which fuse
several checkpoint tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.common.errors import UserError
from harness.common.files import refuse_special
from harness.common.memory import free_memory
from harness.common.messages import GIB
from harness.model.config import EMBEDDING, HEAD, WEIGHT_BYTES, ModelConfig
from harness.model.tensor_names import TensorKind, check_tensors, public_names, unreadable

PARTS = ("W_query", "W_key", "W_value")
FUSED = ".att.qkv."


def check_memory(config: ModelConfig) -> None:
    """Raise UserError if this machine's free memory cannot hold even the fp32 weights of a model on the CPU. Must be
    called before the model is created, because Linux overcommits memory, and its OOM killer gives no message."""
    needed = config.parameters * WEIGHT_BYTES
    if torch.get_default_device().type == "cpu" and needed > free_memory():
        raise UserError(
            f"model.json: {config.parameters:,} parameters take {needed / GIB:,.2f} GiB of memory, and "
            f"{free_memory() / GIB:,.2f} GiB are free; free some, or make the model smaller"
        )


def checkpoint_names(name: str) -> list[str]:
    """Return the names that a tensor of the model has in checkpoints: several for a fused tensor, one for others."""
    return [name.replace("qkv", part) for part in PARTS] if FUSED in name else [name]


def split_fused(name: str, tensor: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """Return the checkpoint tensors, by name, that the model's tensor `name` consists of: views of its parts if it is
    fused, else the tensor itself."""
    sizes = config.query_width, config.kv_width, config.kv_width
    pieces = tensor.split(sizes) if FUSED in name else (tensor,)
    return dict(zip(checkpoint_names(name), pieces, strict=True))


def checkpoint_views(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict under the names that they have in checkpoints, as views, not
    copies."""
    split = (split_fused(name, tensor.detach(), config) for name, tensor in state.items())
    return {name: part for parts in split for name, part in parts.items()}


def kinds_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorKind]:
    """Return the shape and dtype of each tensor, in the form that `check_tensors` takes."""
    return {name: (tuple(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in tensors.items()}


def from_checkpoint_names(offered: Mapping[str, Tensor], config: ModelConfig, source: Path) -> dict[str, Tensor]:
    """Return the tensors of a weights file under their names in checkpoints. Raises UserError, naming `source`, if they
    are not those of the model that `config` describes."""
    tensors = public_names(offered, tied=config.tie_weights)
    check_tensors(kinds_of(tensors), config.tensor_shapes(), source)
    if config.tie_weights and not torch.equal(tensors[HEAD], tensors[EMBEDDING]):
        raise UserError(f'{source}: not the model\'s weights: "tie_weights" is true but out_head and tok_emb differ')
    return tensors


def load_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises UserError if the file cannot be read."""
    try:
        refuse_special(path)
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from None


def save_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. The tensors must be contiguous and share no memory. Raises SafetensorError or
    OSError."""
    path.touch()
    mode = path.stat().st_mode  # as the umask asks; safetensors replaces the file by one with mode 0600
    save_file(tensors, path, metadata={"format": "pt"})
    with suppress(PermissionError):  # some file systems have no permissions
        path.chmod(mode)
