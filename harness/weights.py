"""A file of weights, and what the files beside it say about it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.config import read_json_object
from harness.errors import UserError
from harness.files import umask
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


def save_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises SafetensorError or OSError."""
    save_file(tensors, path, metadata={"format": "pt"})
    os.chmod(path, 0o666 & ~umask())  # safetensors makes it 0600 whatever the umask


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, weights: Path) -> None:
    """Raises UserError for a tokenizer with tokens that a model of `vocab_size` does not have; it may have more."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{weights.parent}: its tokenizer has {tokenizer.vocab_size:,} tokens, the model {vocab_size:,}: it is "
            f"another model's; put the right one beside the weights, and its name into {META}"
        )


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
