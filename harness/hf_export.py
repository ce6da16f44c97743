"""A model as a folder that transformers loads as its native GPT-2, without any code of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from harness.files import replace_text
from harness.gpt2_format import check_exact, to_config, to_tensors
from harness.model_files import WEIGHTS, ModelFiles
from harness.model_folder import new_folder
from harness.tokenizer import load_tokenizer
from harness.tokenizer_export import export_tokenizer
from harness.weights import check_vocabulary, save_weights, tokenizer_file_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_model(model: Any, files: ModelFiles, folder: Path, dtype: str) -> None:
    """Write `model` (a gpt.GPTModel with the weights of `files`) and its tokenizer to a new folder.

    Raises UserError for a model that GPT-2's class does not compute, or a folder that is there already, RunError if it
    cannot be written; nothing is then left of it.
    """
    check_exact(model.config)
    tokenizer = tokenizer_file_of(files.weights)
    loaded = load_tokenizer(tokenizer)
    check_vocabulary(loaded, model.config.vocab_size, files.weights)
    with new_folder(folder) as draft:
        tensors = to_tensors(model.public_tensors(), model.config)
        converted = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
        save_weights(converted, draft / WEIGHTS)
        config = to_config(model.config, loaded.eot_token, str(DTYPES[dtype]).removeprefix("torch."))
        replace_text(draft / "config.json", json.dumps(config, indent=2) + "\n")
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), loaded.eot_token)
        replace_text(draft / "generation_config.json", json.dumps(ends, indent=2) + "\n")
        export_tokenizer(tokenizer, draft, model.config.context_length)
