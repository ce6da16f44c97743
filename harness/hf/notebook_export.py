"""A model as files that the lab notebook's own scripts load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.data.tokenizers.load import load_tokenizer
from harness.hf.export import DTYPES
from harness.hf.notebook_format import to_model_json, to_tensors
from harness.model.export_formats import choose_format
from harness.runs.model_folder import check_tokenizer_fits, tokenizer_file_of, write_model
from harness.runs.named_models import TrainedModel


def export_for_notebook(model: Any, files: TrainedModel, folder: Path, dtype: str) -> list[str]:
    """Write `model` (a gpt.GPTModel with the weights of `files`) to a new folder: model.json, model.safetensors, and
    for readers of ours the tokenizer and a meta.json that names it. Returns what the user has to know besides.

    Raises UserError for a model that the notebook's does not compute, or a folder that is there already, RunError if it
    cannot be written; nothing is then left of it.
    """
    choose_format(model.config, files.config_source, for_notebook=True)
    tokenizer = tokenizer_file_of(files.weights)
    if isinstance(tokenizer, Path):  # GPT-2's own is not written, nor needed
        check_tokenizer_fits(load_tokenizer(tokenizer), model.config.vocab_size, files.weights)
    weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in model.to_checkpoint_names().items()}
    shape = to_model_json(model.config)
    write_model(folder, shape, to_tensors(weights, model.config), tokenizer=tokenizer, facts={})
    return _notes(model.config.tie_weights, tokenizer)


def _notes(is_tied: bool, tokenizer: str | Path) -> list[str]:
    notes = []
    if is_tied:
        notes.append("the tied head is written out as a tensor of its own, and model.json no longer calls it tied")
    if tokenizer != "gpt2":
        notes.append("the notebook's scripts read and write text by GPT-2's tokenizer; this model has another one")
    return notes
