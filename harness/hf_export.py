"""A model as a folder that transformers loads as its native GPT-2, without any code of ours."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from harness.errors import RunError, UserError
from harness.files import replace_text, sync, umask
from harness.gpt2_format import check_exact, to_config, to_tensors
from harness.model_files import ModelFiles
from harness.tokenizer import load_tokenizer
from harness.tokenizer_export import export_tokenizer
from harness.weights import tokenizer_file_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_model(model: Any, files: ModelFiles, folder: Path, dtype: str) -> None:
    """Write `model` (a gpt.GPTModel with the weights of `files`) and its tokenizer to a new folder.

    Raises UserError for a model that GPT-2's class does not compute, or a folder that is there already, RunError if it
    cannot be written; nothing is then left of it.
    """
    check_exact(model.config)
    tokenizer = tokenizer_file_of(files.weights)
    loaded = load_tokenizer(tokenizer)
    if loaded.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{files.weights.parent}: its tokenizer has {loaded.vocab_size:,} tokens, the model "
            f"{model.config.vocab_size:,}: it is another model's; put the right one beside the weights"
        )
    with new_folder(folder) as draft:
        tensors = to_tensors(model.public_tensors(), model.config)
        converted = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
        save_file(converted, draft / "model.safetensors", metadata={"format": "pt"})
        os.chmod(draft / "model.safetensors", 0o666 & ~umask())  # safetensors makes it 0600 whatever the umask
        config = to_config(model.config, loaded.eot_token, str(DTYPES[dtype]).removeprefix("torch."))
        replace_text(draft / "config.json", json.dumps(config, indent=2) + "\n")
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), loaded.eot_token)
        replace_text(draft / "generation_config.json", json.dumps(ends, indent=2) + "\n")
        export_tokenizer(tokenizer, draft, model.config.context_length)


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
