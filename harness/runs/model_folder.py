"""A model's folder: its configuration, its weights, and what the files beside them say about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ModelFiles:
    """A folder with weights: a checkpoint of this program or the notebook's, an imported model, or the like."""

    weights: Path
    config: dict[str, Any]  # model.json's object
    config_source: Path  # the file it stands in
    meta: dict[str, Any]  # of the weights; empty if there is none

    @classmethod
    def find(cls, path: Path, model_json: Path | None) -> ModelFiles:
        """The model in a folder, or whose weights are the file `path`.

        Its configuration is in `model_json` or, if that is None, in a model.json beside the weights, in the
        checkpoint's meta.json, or in the run directory that the checkpoint lies in. Raises UserError if there is none.
        """
        weights = path if path.suffix == ".safetensors" else path / WEIGHTS
        if not weights.is_file():
            what = "no such file" if path.suffix == ".safetensors" else f"no {WEIGHTS} in this folder"
            raise UserError(f"{path}: {what if path.exists() or weights is path else 'no such folder'}")
        folder = weights.parent
        meta = read_json_object(folder / META) if (folder / META).is_file() else {}
        # A link (`best`) may stand outside its run; what it leads to lies in it.
        run = Path(folder.resolve()).parent.parent
        for candidate in [model_json] if model_json else [folder / MODEL_JSON, folder / META, run / MODEL_JSON]:
            if candidate.name == META and not isinstance(meta.get("model"), dict):
                continue
            if candidate.is_file() or model_json:
                config = meta["model"] if candidate.name == META else read_json_object(candidate)
                return cls(weights, config, candidate, meta)
        if (folder / "config.json").is_file():
            raise UserError(
                f"{folder}: as transformers saves models; convert_hf.py import {folder} RUN makes a run of it"
            )
        raise UserError(f"{folder}: no model.json tells the shape of these weights; give it by --model-json")

    @property
    def run(self) -> Path | None:
        """The run directory that the checkpoint lies in, if it does."""
        folder = Path(self.weights.parent.resolve())
        run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
        return run if (run / MODEL_JSON).is_file() else None


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
    """What whoever opens the weights looks up beside them."""
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
