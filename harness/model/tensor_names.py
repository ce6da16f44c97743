"""Tensors of published checkpoints of this model family: their public names and types, and the names of the files in
the folder of a model. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from safetensors import SafetensorError, safe_open

from harness.common.errors import UserError
from harness.common.messages import abbreviated
from harness.model.config import EMBEDDING as EMBEDDING
from harness.model.config import HEAD as HEAD
from harness.model.config import ModelConfig

# Files in the folder of a model or of a checkpoint
WEIGHTS, MODEL_JSON, META = "model.safetensors", "model.json", "meta.json"

# Prefixes of all tensor names in a file that was saved from a wrapper around the model (DistributedDataParallel,
# torch.compile) instead of the model itself.
WRAPPERS = ("module.", "_orig_mod.")
LOADABLE = ("float64", "float32", "float16", "bfloat16")
SHOWN_DIFFERENCES = 3
# torch's names of dtypes by those of safetensors, for dtypes whose names differ by more than case.
TORCH_TYPES = {
    **{f"{short}{bits}": f"{long}{bits}" for short, long in (("F", "float"), ("I", "int")) for bits in (16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "I8": "int8",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}

Offered = TypeVar("Offered")


class TensorKind(NamedTuple):
    """Shape and dtype (torch's name) of a tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: str


def public_names(offered: Mapping[str, Offered], *, tied: bool) -> dict[str, Offered]:
    """Return the entries of a weights file by public name: without `att.mask` buffers, and without the prefix of a
    wrapper around the model. If `tied`, an output head or token embedding that is missing is taken from the other."""
    found = _without_wrapper({name: value for name, value in offered.items() if not name.endswith(".att.mask")})
    if tied:  # files of tied models hold the shared tensor under both names, or under either
        for one, other in ((HEAD, EMBEDDING), (EMBEDDING, HEAD)):
            if one not in found and other in found:
                found[one] = found[other]
    return found


def _without_wrapper(offered: dict[str, Offered]) -> dict[str, Offered]:
    for prefix in WRAPPERS:
        if offered and all(name.startswith(prefix) for name in offered):
            return _without_wrapper({name.removeprefix(prefix): value for name, value in offered.items()})
    return offered


def check_tensors(offered: Mapping[str, TensorKind], wanted: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Raise UserError if the tensors of a file are not those of the model. The error names `source` and the
    differences: first in the order of the model's tensors, then the tensors that only the file has."""
    faults = []
    for name, shape in wanted.items():
        if name not in offered:
            faults.append(f"tensor {name} {list(shape)} is missing")
        elif offered[name].shape != shape:
            faults.append(f"tensor {name} is {list(offered[name].shape)} in the file, {list(shape)} in model.json")
        elif offered[name].dtype not in LOADABLE:
            faults.append(f"tensor {name} is {offered[name].dtype}; weights are fp32, fp16 or bf16")
    faults += [f"tensor {name} is not in model.json's shape" for name in sorted(offered.keys() - wanted.keys())]
    if faults:
        raise UserError(f"{source}: not this model: {abbreviated(faults, SHOWN_DIFFERENCES, separator='; ')}")


def check_weights_file(path: Path, config: ModelConfig) -> None:
    """Raise UserError if a safetensors file is missing, damaged or holds another model. Reads only its header."""
    try:
        with safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - `file` is not a dict
            kinds = {name: _kind(each.get_shape(), each.get_dtype()) for name, each in slices.items()}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None
    check_tensors(public_names(kinds, tied=config.tie_weights), config.tensor_shapes(), path)


def _kind(shape: list[int], dtype: str) -> TensorKind:
    return TensorKind(tuple(shape), TORCH_TYPES.get(dtype, dtype.lower()))
