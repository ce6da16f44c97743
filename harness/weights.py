"""A file of weights, and what the files beside it say about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from harness.config import read_json_object
from harness.errors import UserError
from harness.run import check_name
from harness.tokenizer import Tokenizer, load_tokenizer

META = "meta.json"


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises UserError if it is missing or damaged."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None


def tokenizer_of(weights: Path) -> Tokenizer:
    """The tokenizer of the model whose weights are in this file: the one beside it, or else GPT-2's."""
    return load_tokenizer(tokenizer_file_of(weights))


def tokenizer_file_of(weights: Path) -> str | Path:
    """What `load_tokenizer` takes for that tokenizer: "gpt2", or the file beside the weights."""
    name = _beside(weights).get("tokenizer", "gpt2")
    return "gpt2" if name == "gpt2" else weights.parent / check_name(str(name), f"{weights.parent / META}: tokenizer")


def dataset_of(weights: Path) -> str | None:
    """The name of the dataset that a checkpoint's weights were trained on; None if nothing beside them tells."""
    dataset = _beside(weights).get("dataset")
    return str(dataset["name"]) if isinstance(dataset, dict) and "name" in dataset else None


def _beside(weights: Path) -> dict[str, Any]:
    meta = weights.parent / META
    return read_json_object(meta) if meta.is_file() else {}
