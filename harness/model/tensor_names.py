"""Names and types of the tensors in this model family's checkpoints, and names of the files in a model's folder. Does
not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open

from harness.common.errors import UserError
from harness.common.files import refuse_special
from harness.common.messages import REASON_CHARACTERS, abbreviated
from harness.model.config import EMBEDDING, HEAD, ModelConfig

# Files in the folder of a model or of a checkpoint
WEIGHTS, MODEL_JSON, META = "model.safetensors", "model.json", "meta.json"

# Prefixes of all tensor names in a file that was saved from a wrapper around the model (DistributedDataParallel,
# torch.compile) instead of the model itself.
WRAPPERS = ("module.", "_orig_mod.")
LOADABLE = ("float64", "float32", "float16", "bfloat16")
SHOWN_DIFFERENCES = 3
# torch's dtype names by those of safetensors, where the two differ by more than case.
TORCH_TYPES = {
    **{f"{short}{bits}": f"{long}{bits}" for short, long in (("F", "float"), ("I", "int")) for bits in (16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "I8": "int8",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}

Offered = TypeVar("Offered")
TensorKind = tuple[tuple[int, ...], str]  # shape and dtype (torch's name) of a tensor, known before it is read


def public_names(offered: Mapping[str, Offered], *, tied: bool) -> dict[str, Offered]:
    """Return the entries of a weights file under their names in checkpoints, without prefixes of wrappers around the
    model. Causal masks (`att.mask` buffers) are left out. If head and token embedding are `tied` and only one is in the
    file, its entry is returned under both names."""
    found = {name: value for name, value in offered.items() if not name.endswith(".att.mask")}
    while prefix := next((each for each in WRAPPERS if found and all(name.startswith(each) for name in found)), ""):
        found = {name.removeprefix(prefix): value for name, value in found.items()}
    if tied:  # files of tied models hold the shared tensor under both names or only one
        for one, other in ((HEAD, EMBEDDING), (EMBEDDING, HEAD)):
            if one not in found and other in found:
                found[one] = found[other]
    return found


def check_tensors(offered: Mapping[str, TensorKind], wanted: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Raise UserError, naming `source`, if the tensors of a file (`offered`) do not have the names and shapes in
    `wanted`, or if a dtype is not one of LOADABLE."""
    faults = []
    for name, shape in wanted.items():
        found, dtype = offered.get(name, (None, ""))
        if found is None:
            faults.append(f"tensor {name} {list(shape)} is missing")
        elif found != shape:
            faults.append(f"tensor {name} is {list(found)} in the file, {list(shape)} in the model")
        elif dtype not in LOADABLE:
            faults.append(f"tensor {name} is {dtype}; weights are fp64, fp32, fp16 or bf16")
    faults += [f"tensor {name} is not in the model" for name in sorted(offered.keys() - wanted.keys())]
    if faults:
        raise UserError(f"{source}: not the model's weights: {abbreviated(faults, SHOWN_DIFFERENCES, separator='; ')}")


def unreadable(path: Path, error: SafetensorError | OSError) -> UserError:
    """Return the error to raise if safetensors could not read a file."""
    if not path.is_file():
        return UserError(f"{path}: no such file")
    return UserError(f"{path}: not a readable safetensors file: {str(error)[:REASON_CHARACTERS]}")


def check_weights_file(path: Path, config: ModelConfig) -> None:
    """Raise UserError if a safetensors file cannot be read, or does not hold the model that `config` describes. Reads
    only its header."""
    try:
        refuse_special(path)
        with safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - `file` is not a dict
            kinds = {
                name: (tuple(each.get_shape()), TORCH_TYPES.get(each.get_dtype(), each.get_dtype().lower()))
                for name, each in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from None
    check_tensors(public_names(kinds, tied=config.tie_weights), config.tensor_shapes(), path)
