"""Export of a model to a folder that transformers, or the scripts of Giles Thomas's lab notebook, can load."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gpt import GPTModel
from harness.common.errors import UserError
from harness.common.files import replace_text
from harness.data.tokenizers import (
    END_OF_TEXT,
    ROUND_TRIP_PROBE,
    TIKTOKEN_SUFFIX,
    character_of_byte,
    load_tokenizer,
    read_encoding,
)
from harness.hf.formats import NOTEBOOK_KEYS, OWN_TYPE, peer_config, peer_tensors, write_code
from harness.model.export_formats import check_for_notebook, native_class
from harness.model.precision import DTYPES
from harness.model.tensor_names import WEIGHTS
from harness.model.weights import save_weights
from harness.runs.trained_model import TrainedModel, check_tokenizer_fits, new_folder, write_model

# Text that different splitting patterns split differently: words of several lengths, digits, contractions, white space.
SPLITTING_PROBE = f"It's 12345 o'clock, DON'T  worry\n\n\t{ROUND_TRIP_PROBE}".replace(END_OF_TEXT, "")


def export_model(model: GPTModel, files: TrainedModel, folder: Path, dtype: str) -> None:
    """Write a model and its tokenizer in transformers' format to `folder`, which must be new or empty. `model` was
    loaded from `files`. `dtype` is a key of DTYPES. If transformers has no class for the model, the model's code is
    written, too.

    Raises UserError or RunError if the export fails. No partial folder remains then.
    """
    shape, kind = model.config, native_class(model.config) or OWN_TYPE
    tokenizer = files.tokenizer_file
    loaded = load_tokenizer(tokenizer)
    check_tokenizer_fits(loaded, shape.vocab_size, files.weights)
    with new_folder(folder) as draft:
        if kind == OWN_TYPE:
            write_code(draft)
        tensors = {
            name: tensor.to("cpu", DTYPES[dtype]).clone(memory_format=torch.contiguous_format)
            for name, tensor in peer_tensors(kind, model).items()
        }
        save_weights(tensors, draft / WEIGHTS)
        ends = dict.fromkeys(("bos_token_id", "eos_token_id"), loaded.eot_token)
        config = peer_config(kind, shape) | ends | {"dtype": str(DTYPES[dtype]).removeprefix("torch.")}
        _write_json(draft / "config.json", config)
        _write_json(draft / "generation_config.json", ends | {"pad_token_id": loaded.eot_token})
        export_tokenizer(tokenizer, draft, shape.context_length)


def export_for_notebook(model: GPTModel, files: TrainedModel, folder: Path, dtype: str) -> list[str]:
    """Write a model to `folder`, which must be new or empty, for the scripts of Giles Thomas's lab notebook. Our own
    commands can load the folder, too. `model` was loaded from `files`. `dtype` is a key of DTYPES. Return remarks for
    the user.

    Raises UserError or RunError if the export fails. No partial folder remains then.
    """
    shape, tokenizer, notes = model.config, files.tokenizer_file, []
    check_for_notebook(shape, files.config_source)
    if shape.tie_weights:
        notes.append(
            'the tied head is written out as a tensor of its own; the folder\'s model.json lacks "tie_weights", so '
            "that the model is loaded as an untied one"
        )
    if isinstance(tokenizer, Path):  # "gpt2" has no file to write, and the scripts use GPT-2's tokenizer anyway
        check_tokenizer_fits(load_tokenizer(tokenizer), shape.vocab_size, files.weights)
        notes.append(f"the notebook's scripts use GPT-2's tokenizer, and not the model's own, {tokenizer.name}")
    # The key "tie_weights" is never written. For a tied model, the program's `load_state_dict` requires the head in the
    # file. But safetensors' `load_model`, which later versions of the program use, refuses a file with both matrices of
    # a tied model. Without the key, both functions load the two matrices as those of an untied model. For a model
    # without experts, the key "moe" is not written either, because the program builds experts even for "moe": null.
    experts = {"moe": shape.moe.model_dump(exclude_none=True)} if shape.moe else {}
    model_json = {key: getattr(shape, key) for key in NOTEBOOK_KEYS} | experts
    # `load_state_dict` also requires the causal mask of each block, (T, T) with ones above the diagonal, which the
    # book's MultiHeadAttention registers as a buffer.
    mask = torch.ones(shape.context_length, shape.context_length).triu(diagonal=1)
    tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in model.to_checkpoint_names().items()}
    tensors |= {f"trf_blocks.{layer}.att.mask": mask for layer in range(shape.n_layers)}
    write_model(folder, model_json, tensors, tokenizer=tokenizer, facts={})
    return notes


def export_tokenizer(name_or_file: str | Path, folder: Path, context_length: int) -> None:
    """Write a tokenizer to `folder` as tokenizer.json and tokenizer_config.json. `name_or_file` is "gpt2" or a
    tokenizer's file. `context_length` is recorded as the greatest number of tokens of a text. Raises UserError if the
    written tokenizer has another size or end-of-text token, or encodes SPLITTING_PROBE differently."""
    path = folder / "tokenizer.json"
    if isinstance(name_or_file, Path) and not name_or_file.name.endswith(TIKTOKEN_SUFFIX):
        content = json.loads(name_or_file.read_text(encoding="utf-8"))
        if (content.get("post_processor") or {}).get("type") != "ByteLevel":
            content["post_processor"] = None  # it would add tokens around a text, which training did not
        replace_text(path, json.dumps(content, ensure_ascii=False) + "\n")
    else:
        replace_text(path, _from_tiktoken(read_encoding(name_or_file)).to_str(pretty=False) + "\n")
    ours, theirs = load_tokenizer(name_or_file), load_tokenizer(path)
    found = [(each.vocab_size, each.eot_token, each.encode(SPLITTING_PROBE)) for each in (ours, theirs)]
    if found[0] != found[1]:
        raise UserError(f"{name_or_file}: cannot be exported: as a tokenizer.json, it would encode text differently")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), ours.decode([ours.eot_token])),
        "clean_up_tokenization_spaces": False,
        # Before version 5, transformers would add token_type_ids. GPT-2 adds their embeddings, and others refuse them.
        "model_input_names": ["input_ids", "attention_mask"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    replace_text(path, json.dumps(content, indent=2) + "\n")


def _from_tiktoken(encoding: Any) -> Any:
    """Return a byte-level BPE tokenizer of the tokenizers library that is equivalent to an encoding of tiktoken."""
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

    # This attribute, _special_tokens and _pat_str are private, but tiktoken has no public access to an encoding's
    # parts.
    ranks: dict[bytes, int] = encoding._mergeable_ranks
    character = character_of_byte()

    def spelt(token: bytes) -> str:
        return "".join(character[byte] for byte in token)

    # A merge is the pair of parts into which byte pair encoding splits a token of several bytes if it may use only
    # tokens of lower rank. A token that it splits into more parts has no merge.
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[at : at + 1] for at in range(len(token))]
        while len(parts) > 2:
            least, at = min((ranks.get(left + right, rank), at) for at, (left, right) in enumerate(pairwise(parts)))
            if least >= rank:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((spelt(parts[0]), spelt(parts[1])))
    # The vocabulary includes the special tokens, so that they keep their ids even if some ids are unused.
    vocabulary = {spelt(token): rank for token, rank in ranks.items()} | encoding._special_tokens
    # With ignore_merges, a word that is in the vocabulary becomes a single token even if the merges would not produce
    # that token, as in tiktoken.
    backend: Any = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(encoding._pat_str), "isolated")
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, by_byte])
    backend.decoder = decoders.ByteLevel()
    special = sorted(encoding._special_tokens.items(), key=lambda item: item[1])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text, _ in special])
    return backend
