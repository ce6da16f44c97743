"""A model's folder: its configuration, its weights, and what the files beside them say about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from harness.common.errors import RunError, UserError
from harness.common.files import atomic_folder, check_name, replace_text
from harness.common.json_files import read_json_object
from harness.data.tokenizers.load import load_tokenizer
from harness.data.tokenizers.tokenizer import Tokenizer
from harness.model.tensor_names import META, MODEL_JSON, WEIGHTS
from harness.model.weights import save_weights


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to be filled in the body, which then appears whole as `folder` (see `atomic_folder`).

    Raises UserError if `folder` has something in it, RunError if the disk refuses.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(f"{folder}: exists; give another place, or move it away")
    try:
        with atomic_folder(folder) as draft:
            yield draft
    except (OSError, SafetensorError) as error:  # safetensors wraps a full disk in an exception of its own
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{folder}: cannot be written: {reason}") from None


def write_model(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, tokenizer: str | Path, facts: dict[str, Any]
) -> None:
    """Write a new folder with model.json, the weights under their public names, the tokenizer ("gpt2" or a file), and
    a meta.json that holds `facts`, too.

    Raises as `new_folder` does.
    """
    with new_folder(folder) as draft:
        fill(draft, config, tensors)
        if isinstance(tokenizer, Path):
            shutil.copyfile(tokenizer, draft / tokenizer.name)
        name = tokenizer.name if isinstance(tokenizer, Path) else tokenizer
        write_meta(draft, config, tokenizer=name, **facts)


def fill(draft: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """model.json and model.safetensors."""
    replace_text(draft / MODEL_JSON, json.dumps(config, indent=4) + "\n")
    save_weights({name: tensor.clone() for name, tensor in tensors.items()}, draft / WEIGHTS)  # safetensors shares none


def write_meta(draft: Path, config: dict[str, Any], **values: Any) -> None:
    """Write meta.json: the model's configuration and further facts about the weights."""
    replace_text(draft / META, json.dumps({"model": config, **values}, indent=2, allow_nan=False) + "\n")


def check_tokenizer_fits(tokenizer: Tokenizer, vocab_size: int, weights: Path) -> None:
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
    """Argument of `load_tokenizer` for the model's tokenizer: "gpt2", or the file beside the weights."""
    name = _beside(weights).get("tokenizer", "gpt2")
    return "gpt2" if name == "gpt2" else weights.parent / check_name(str(name), f"{weights.parent / META}: tokenizer")


def dataset_of(weights: Path) -> str | None:
    """The name of the dataset that a checkpoint's weights were trained on; None if nothing beside them tells."""
    dataset = _beside(weights).get("dataset")
    return str(dataset["name"]) if isinstance(dataset, dict) and "name" in dataset else None


def _beside(weights: Path) -> dict[str, Any]:
    meta = weights.parent / META
    return read_json_object(meta) if meta.is_file() else {}
