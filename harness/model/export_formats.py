"""Formats of other programs that a model can be exported to, as its model.json decides. Without torch.

Three are classes of transformers, by its `model_type`; the fourth is the lab notebook's program.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.common.errors import UserError
from harness.common.messages import quoted
from harness.model.config import ModelConfig

NOTEBOOK = "notebook"
# Keys of model.json, and their values that a format computes.
BOTH: dict[str, tuple[Any, ...]] = {
    "logit_softcap": (None,),
    "value_embeddings": (None,),
    "embedding_skip": (False,),
    "bigram_embedding": (None,),
}
GPT2 = {"position": ("learned",), "norm": ("layernorm",), "qk_norm": (False,), **BOTH}
LLAMA = {"position": ("rope",), "norm": ("rmsnorm",), "mlp": ("swiglu",), **BOTH, "moe": (None,)}
FORMATS = {
    "gpt2": {**GPT2, "mlp": ("gelu", "relu2"), "moe": (None,)},
    "llama": {**LLAMA, "qk_norm": (False,)},
    "qwen3": {**LLAMA, "qk_norm": (True,), "linear_bias": (False,)},
    NOTEBOOK: {**GPT2, "mlp": ("gelu",), "linear_bias": (True,)},
}


def missing_for_export(shape: ModelConfig) -> dict[str, list[str]]:
    """The keys and values that model.json lacks for each format to compute the same, the nearest format first."""
    missing = {name: _missing(shape, name) for name in FORMATS}
    return dict(sorted(missing.items(), key=lambda item: len(item[1])))


def _missing(shape: ModelConfig, name: str) -> list[str]:
    computed = dict(FORMATS[name])
    if name in ("gpt2", NOTEBOOK):
        computed |= {"n_kv_heads": (None, shape.n_heads), "head_dim": (None, shape.emb_dim // shape.n_heads)}
    if name == NOTEBOOK:
        computed["mlp_dim"] = (None, 4 * shape.emb_dim)
    missing = [
        f'"{key}": {" or ".join(map(quoted, values))}'
        for key, values in computed.items()
        if getattr(shape, key) not in values
    ]
    if name == NOTEBOOK and not isinstance(shape.drop_rate, (int, float)):
        missing.append('"drop_rate": one number')
    # GPT-2 has its heads side by side in the width, and transformers loads no such Llama, whatever its head_dim.
    if name != "qwen3" and shape.emb_dim % shape.n_heads:
        missing.append(f'"emb_dim": a multiple of {shape.n_heads}')
    return missing


def describe_formats(shape: ModelConfig) -> str:
    """The formats that a model of this shape can be exported to, or what the nearest one needs."""
    missing = missing_for_export(shape)
    nearest = next(iter(missing))
    return ", ".join(name for name in missing if not missing[name]) or (
        f"to no format; the nearest, {nearest}, needs {', '.join(missing[nearest])}"
    )


def choose_format(shape: ModelConfig, source: Path, *, for_notebook: bool = False) -> str:
    """The format that a model of this shape is written in. Raises UserError, naming the file `source` that has the
    shape and what every format needs, if there is none."""
    missing = missing_for_export(shape)
    possible = [name for name in missing if not missing[name]]
    for name in possible:
        if (name == NOTEBOOK) == for_notebook:
            return name
    asked, other = ("notebook", "transformers") if for_notebook else ("transformers", "notebook")
    needed = {name: keys for name, keys in missing.items() if keys}
    by_all = [key for key in next(iter(needed.values())) if all(key in keys for keys in needed.values())]
    besides = {name: ", ".join(key for key in keys if key not in by_all) for name, keys in needed.items()}
    each = "; ".join(f"{name}: {keys or 'nothing else'}" for name, keys in besides.items())
    every = f"{', '.join(by_all)} and, " if by_all else ""
    raise UserError(
        f"{source}: --format {asked} cannot write this model{f', --format {other} can' if possible else ''}; to train "
        f"one that can be exported, let model.json have {every}for the nearest format first: {each}"
    )
