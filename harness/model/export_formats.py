"""Check of a model.json against the formats of other programs to which models can be exported. Does not import torch.

Three formats are named after the `model_type` of a model class in transformers. "notebook" is the format of Giles
Thomas's training program (github.com/gpjt/ddp-base-model-from-scratch).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.common.errors import UserError
from harness.common.messages import quoted
from harness.model.config import ModelConfig

NOTEBOOK = "notebook"
# Options of model.json for which at least one format supports values other than the default.
COMPUTED = {
    *("tie_weights", "position", "norm", "mlp", "qk_norm", "n_kv_heads", "rope_base", "norm_gain", "linear_bias"),
    *("head_dim", "mlp_dim", "initialisation", "moe"),
}
ONLY_DEFAULTS: dict[str, tuple[Any, ...]] = {  # the other options: every format needs their defaults
    key: (default,) for key, default in ModelConfig.defaults().items() if key not in COMPUTED
}
GPT2 = {"position": ("learned",), "norm": ("layernorm",), "qk_norm": (False,), **ONLY_DEFAULTS}
LLAMA = {"position": ("rope",), "norm": ("rmsnorm",), "mlp": ("swiglu",), **ONLY_DEFAULTS, "moe": (None,)}
# For each format, the values of options that it can represent. `missing_for_export` adds conditions on other options.
# All remaining options can have any value.
FORMATS = {
    "gpt2": {**GPT2, "mlp": ("gelu", "relu2"), "moe": (None,)},
    "llama": {**LLAMA, "qk_norm": (False,)},
    "qwen3": {**LLAMA, "qk_norm": (True,), "linear_bias": (False,)},
    NOTEBOOK: {**GPT2, "mlp": ("gelu",), "linear_bias": (True,)},
}


def missing_for_export(shape: ModelConfig) -> dict[str, list[str]]:
    """Return, for each format, the keys of model.json that would have to change, with the values needed, as text. A
    format that can represent the model has an empty list. Formats with the shortest lists come first."""
    like_gpt2 = {"n_kv_heads": (None, shape.n_heads), "head_dim": (None, shape.emb_dim // shape.n_heads)}
    missing = {}
    for name, options in FORMATS.items():
        computed = options | (like_gpt2 if name in ("gpt2", NOTEBOOK) else {})
        if name == NOTEBOOK:
            computed["mlp_dim"] = (None, 4 * shape.emb_dim)
        missing[name] = [
            f'"{key}": {" or ".join(map(quoted, values))}'
            for key, values in computed.items()
            if getattr(shape, key) not in values
        ]
        if name == NOTEBOOK and not isinstance(shape.drop_rate, (int, float)):
            missing[name].append('"drop_rate": one number')
        # GPT-2 splits emb_dim into heads. Llama in transformers needs it to be a multiple of n_heads, too.
        if name != "qwen3" and shape.emb_dim % shape.n_heads:
            missing[name].append(f'"emb_dim": a multiple of {shape.n_heads}')
    return dict(sorted(missing.items(), key=lambda item: len(item[1])))


def native_class(shape: ModelConfig) -> str | None:
    """Return the `model_type` of a transformers class that computes models of this shape, or None if no class does."""
    missing = missing_for_export(shape)
    return next((name for name in missing if name != NOTEBOOK and not missing[name]), None)


def describe_formats(shape: ModelConfig) -> str:
    """Return, as text, the formats that a model of this shape can be exported to, and the keys that keep it from a
    native class of transformers."""
    missing = missing_for_export(shape)
    possible = [name for name in missing if not missing[name]]
    if native_class(shape) is None:
        nearest = next(name for name in missing if name != NOTEBOOK)
        lacks = ", ".join(missing[nearest])
        possible.append(f"transformers with trust_remote_code; the nearest native class, {nearest}, needs {lacks}")
    return ", ".join(possible)


def check_for_notebook(shape: ModelConfig, source: Path) -> None:
    """Raise UserError, naming `source` (the file with the shape), if the format "notebook" cannot represent the
    model."""
    missing = missing_for_export(shape)[NOTEBOOK]
    if missing:
        raise UserError(
            f"{source}: --format notebook cannot write this model; use --format transformers, or train a model whose "
            f"model.json has {', '.join(missing)}"
        )
