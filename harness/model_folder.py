"""A new folder with a model in it, which appears whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from harness.errors import RunError, UserError
from harness.files import replace_text, sync
from harness.model_files import MODEL_JSON, WEIGHTS
from harness.weights import META, save_weights


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder that takes the place of `folder` in one rename when all is written and on the disk.

    Raises UserError if `folder` has something in it, RunError if the disk refuses.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(f"{folder}: exists; give another place, or move it away")
    draft = folder.absolute().with_name(f".{folder.absolute().name}.partial-{os.getpid()}")
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        try:
            yield draft
            for path in [*draft.rglob("*"), draft]:
                sync(path)
            draft.rename(folder)
            sync(draft.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors wraps a full disk in an exception of its own
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{folder}: cannot be written: {reason}") from None


def write_model(
    folder: Path, shape: dict[str, Any], tensors: dict[str, Tensor], *, tokenizer: str | Path, facts: dict[str, Any]
) -> None:
    """Write a new folder with model.json, the weights under their public names, the tokenizer ("gpt2" or a file), and
    a meta.json that holds `facts`, too.

    Raises as `new_folder` does.
    """
    with new_folder(folder) as draft:
        fill(draft, shape, tensors)
        if isinstance(tokenizer, Path):
            shutil.copyfile(tokenizer, draft / tokenizer.name)
        name = tokenizer.name if isinstance(tokenizer, Path) else tokenizer
        write_meta(draft, shape, tokenizer=name, **facts)


def fill(draft: Path, shape: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """model.json and model.safetensors."""
    replace_text(draft / MODEL_JSON, json.dumps(shape, indent=4) + "\n")
    save_weights({name: tensor.clone() for name, tensor in tensors.items()}, draft / WEIGHTS)  # safetensors shares none


def write_meta(draft: Path, shape: dict[str, Any], **values: Any) -> None:
    """What whoever opens the weights looks up beside them."""
    replace_text(draft / META, json.dumps({"model": shape, **values}, indent=2, allow_nan=False) + "\n")
