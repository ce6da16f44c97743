"""The tensors of published checkpoints of this model family: their names, shapes and types, and the files
that they come with. Without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from safetensors import SafetensorError, safe_open

from harness.common.errors import UserError
from harness.common.messages import abbreviated
from harness.model.config import ModelConfig

# A model's folder, or a checkpoint's
WEIGHTS, MODEL_JSON, META = "model.safetensors", "model.json", "meta.json"

EMBEDDING, HEAD = "tok_emb.weight", "out_head.weight"
# What wrappers put before every name when a wrapped model is saved in place of the model itself.
WRAPPERS = ("module.", "_orig_mod.")
LOADABLE = ("float64", "float32", "float16", "bfloat16")
SHOWN_DIFFERENCES = 3
# safetensors' names of types, where torch's are not those in small letters.
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


def public_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model, by its public name, in the model's order."""
    width = config.emb_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, width)}
    if config.position == "learned":
        shapes["pos_emb.weight"] = (config.context_length, width)
    if config.bigram_embedding is not None:
        shapes["bigram_emb.weight"] = (config.bigram_embedding, width)
    for table in range(config.value_embeddings or 0):
        shapes[f"value_embs.{table}.weight"] = (config.vocab_size, config.kv_width)
    for layer in range(config.n_layers):
        shapes |= {f"trf_blocks.{layer}.{name}": shape for name, shape in _block_shapes(config, layer).items()}
    return {**shapes, **_norm_shapes("final_norm", config), HEAD: (config.vocab_size, width)}


def _norm_shapes(name: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    parts = ("scale", "shift") if config.norm == "layernorm" else ("scale",) if config.norm_gain else ()
    return {f"{name}.{part}": (config.emb_dim,) for part in parts}


def _block_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """A block's tensors, without the block's own prefix."""
    width, queries, kv = config.emb_dim, config.query_width, config.kv_width
    rows = {"W_query": queries, "W_key": kv, "W_value": kv}
    block: dict[str, tuple[int, ...]] = {"skip.scale": (2,)} if config.embedding_skip else {}
    block |= _norm_shapes("norm1", config)
    block |= {f"att.{part}.weight": (count, width) for part, count in rows.items()}
    block |= {f"att.{part}.bias": (count,) for part, count in rows.items() if config.qkv_bias}
    block |= _linear_shapes("att.out_proj", (width, queries), config)
    if config.qk_norm and config.norm_gain:
        block |= {f"att.{part}_norm.scale": (config.head_width,) for part in "qk"}
    if config.value_embedding_of(layer) is not None:
        block["att.value_mix.scale"] = (2,)
    block |= _norm_shapes("norm2", config)
    if config.moe is None:
        return block | _feed_forward_shapes("ff", config)
    block["ff.router.weight"] = (config.moe.num_experts, width)
    for expert in range(config.moe.num_experts):
        block |= _feed_forward_shapes(f"ff.experts.{expert}", config)
    return block


def _feed_forward_shapes(name: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, hidden = config.emb_dim, config.mlp_width
    shapes = _linear_shapes(f"{name}.layers.0", (hidden, width), config)
    shapes |= _linear_shapes(f"{name}.layers.2", (width, hidden), config)
    return shapes | (_linear_shapes(f"{name}.gate", (hidden, width), config) if config.mlp == "swiglu" else {})


def _linear_shapes(name: str, shape: tuple[int, int], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    bias: dict[str, tuple[int, ...]] = {f"{name}.bias": shape[:1]} if config.linear_bias else {}
    return {f"{name}.weight": shape, **bias}


def public_names(offered: Mapping[str, Offered], *, tied: bool) -> dict[str, Offered]:
    """The entries of a file by public name. Leaves out `att.mask` buffers and the prefix of a wrapper around the model;
    for a tied pair, fills in the half that is missing."""
    found = _without_wrapper({name: value for name, value in offered.items() if not name.endswith(".att.mask")})
    if tied:  # files of such models hold the shared tensor twice, or under one name or the other
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
    """Raises UserError, naming `source` and what differs, if a file offers another model's tensors."""
    faults = _differences(offered, wanted)
    if faults:
        raise UserError(f"{source}: not this model: {abbreviated(faults, SHOWN_DIFFERENCES, separator='; ')}")


def _differences(offered: Mapping[str, TensorKind], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Describe how the file's tensors differ from the model's: in the model's order, then those only in the file."""
    faults = []
    for name, shape in wanted.items():
        if name not in offered:
            faults.append(f"tensor {name} {list(shape)} is missing")
        elif offered[name].shape != shape:
            faults.append(f"tensor {name} is {list(offered[name].shape)} in the file, {list(shape)} in model.json")
        elif offered[name].dtype not in LOADABLE:
            faults.append(f"tensor {name} is {offered[name].dtype}; weights are fp32, fp16 or bf16")
    return faults + [f"tensor {name} is not in model.json's shape" for name in sorted(offered.keys() - wanted.keys())]


def check_weights_file(path: Path, config: ModelConfig) -> None:
    """Raises UserError, from the file's header alone, if a safetensors file is missing, damaged or another model's."""
    try:
        with safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            kinds = {name: _kind(each.get_shape(), each.get_dtype()) for name, each in slices.items()}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None
    check_tensors(public_names(kinds, tied=config.tie_weights), public_shapes(config), path)


def _kind(shape: list[int], dtype: str) -> TensorKind:
    return TensorKind(tuple(shape), TORCH_TYPES.get(dtype, dtype.lower()))
