"""Weights from a Hugging Face folder or repository, a GPT-2 or the notebook's, into a run directory."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt import GPTModel, ModelConfig
from harness.common.errors import UserError
from harness.common.files import replace_text
from harness.common.json_files import parse_config, read_json_object
from harness.data.tokenizers.load import load_tokenizer
from harness.hf import gpt2_format, notebook_format
from harness.model.tensor_names import MODEL_JSON, WEIGHTS
from harness.model.weights import from_checkpoint_names, load_weights
from harness.runs.trained_model import fill, new_folder, write_meta

CONFIG, INDEX, TOKENIZER = "config.json", "model.safetensors.index.json", "tokenizer.json"
WANTED = [CONFIG, WEIGHTS, INDEX, "model-*.safetensors", TOKENIZER, "vocab.json", "merges.txt"]
OTHER_WEIGHTS = {".bin", ".ckpt", ".h5", ".msgpack", ".pt", ".pth"}


def import_model(source: Path, name: str | None, run: Path) -> str:
    """Write model.json, model.safetensors and what belongs to them to the new run directory `run`.

    `source` is a folder with a GPT-2 in transformers' format, or with one of the notebook author's published models;
    `name` is what it is called on the Hub, if it is from there. Returns a line about the tokenizer.
    Raises UserError for anything else in the folder, RunError if the run cannot be written; nothing is then left of it.
    """
    shape, tensors = _read_model(source)
    config = parse_config(ModelConfig, shape, source / CONFIG)
    with torch.device("meta"):  # for the names and shapes of its tensors
        state = GPTModel(config).state_dict()
    from_checkpoint_names(tensors, state, config, source)
    _check_tokenizer(source)
    with new_folder(run) as draft:
        fill(draft, shape, tensors)
        said, tokenizer = _bring_tokenizer(source, draft, shape["vocab_size"])
        write_meta(draft, shape, tokenizer=tokenizer, imported_from=name)
    return said


def _read_model(source: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """model.json's keys, and the tensors under their public names."""
    file = source / CONFIG
    if not file.exists() and (source / MODEL_JSON).exists():
        raise UserError(f"{source}: no {CONFIG}; by its {MODEL_JSON} it is a model that all commands take as it is")
    config = read_json_object(file)
    if config.get("model_type") == notebook_format.MODEL_TYPE:
        shape = notebook_format.from_config(config, file)
        return shape, notebook_format.from_tensors(_weights_of(source), shape)
    shape = gpt2_format.from_config(config, file)
    tensors = gpt2_format.from_tensors(_weights_of(source), shape["n_layers"], source)
    return gpt2_format.without_zero_biases(shape, tensors)


def _weights_of(source: Path) -> dict[str, Tensor]:
    if (source / WEIGHTS).is_file():
        return load_weights(source / WEIGHTS)
    if (source / INDEX).is_file():
        index = read_json_object(source / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise UserError(f'{source / INDEX}: key "weight_map": must tell the file of each tensor')
        tensors: dict[str, Tensor] = {}
        for file in sorted(set(index.values())):
            if Path(file).name != file:
                raise UserError(f"{source / INDEX}: {file!r} leads out of the folder")
            tensors |= load_weights(source / file)
        return tensors
    others = sorted(path.name for path in source.iterdir() if path.suffix in OTHER_WEIGHTS)
    if not others:
        raise UserError(f"{source}: no {WEIGHTS}: a part of a model; download the rest")
    raise UserError(
        f"{source}: no {WEIGHTS}; weights in other formats ({others[0]}) can run code when they are read: convert them "
        "with transformers' save_pretrained"
    )


def _check_tokenizer(source: Path) -> None:
    """Raises UserError for a tokenizer.json that is there but cannot be ours: with GPT-2's in its place every number
    would be wrong. Apart from bringing it, so that no folder has been made by then."""
    if (source / TOKENIZER).exists():
        load_tokenizer(source / TOKENIZER)


def _bring_tokenizer(source: Path, draft: Path, vocab_size: int) -> tuple[str, str]:
    """Put the tokenizer beside the weights. A line about it, and its name in meta.json."""
    if (source / TOKENIZER).exists():
        shutil.copyfile(source / TOKENIZER, draft / TOKENIZER)
    elif (source / "vocab.json").exists() and (source / "merges.txt").exists():
        _from_vocabulary(source, draft / TOKENIZER)
    else:
        return "no tokenizer in the folder: GPT-2's will be used", "gpt2"
    tokenizer = load_tokenizer(draft / TOKENIZER)
    return f"tokenizer of {tokenizer.vocab_size:,} tokens, for a model of {vocab_size:,}", TOKENIZER


def _from_vocabulary(source: Path, path: Path) -> None:
    """GPT-2's own two files as one tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from harness.data.tokenizers.tokenizer import END_OF_TEXT

    try:
        bpe = models.BPE.from_file(str(source / "vocab.json"), str(source / "merges.txt"))
    except Exception as error:  # the library raises nothing more precise
        raise UserError(f"{source}: vocab.json and merges.txt are not a tokenizer: {str(error)[:100]}") from None
    backend: Any = Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    replace_text(path, backend.to_str(pretty=False) + "\n")


def fetch_model(name: str) -> Path:
    """A model repository's files on this machine, from huggingface_hub's cache or the Hub. Raises UserError."""
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from harness.common.hub import HubWork

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    by_hand = "give the path of a folder with the model's files"
    work = HubWork(
        name, "model", Path(HF_HUB_CACHE) / "model", "its name", by_hand, "running the same command again resumes"
    )
    return Path(work.call(lambda: huggingface_hub.snapshot_download(name, allow_patterns=WANTED)))
