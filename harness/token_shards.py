"""Token shards of llm.c and modded-nanogpt, .bin files of tokens (GPT-2's, as a rule), as a dataset's splits.

A shard is a header of 256 int32 (magic 20240520, version 1, number of tokens) and that many uint16. Source of the
format: https://github.com/karpathy/llm.c, dev/data/data_common.py (MIT).
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness.encode import token_dtype
from harness.errors import UserError
from harness.splits import Split
from harness.token_stream import HEADER_BYTES, copy_range, write_header
from harness.tokenizer import Tokenizer
from harness.wording import is_unicode

MAGIC, VERSION = 20240520, 1
SHARD_HEADER_BYTES = 1024
SHARD_DTYPE = np.dtype(np.uint16)
COUNTED_TOKENS = 2**22
SPLIT_WORDS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}


def find_shards(pattern: str) -> dict[str, list[Path]]:
    """The .bin files that a folder, a file or a glob stands for, in order, by the split that their names tell.

    Raises UserError if there are none, or if a name tells of no split or cannot be written into meta.json.
    """
    place = Path(pattern)
    paths = sorted(place.glob("*.bin") if place.is_dir() else map(Path, glob.glob(pattern, recursive=True)))
    if not paths:
        raise UserError(f"{pattern}: no .bin files here (a folder, or a glob in quotes)")
    shards: dict[str, list[Path]] = {}
    for path in paths:
        if not is_unicode(path.name):
            raise UserError(f"{path}: the name is not valid UTF-8; rename it")
        words = path.stem.replace("-", "_").split("_")
        split = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)
        if split is None:
            raise UserError(f"{path}: the name tells of no split; rename it to something_train_000001.bin or _val_")
        shards.setdefault(split, []).append(path)
    if "train" not in shards:
        raise UserError(f"{pattern}: no shard for training (something_train_000001.bin)")
    return shards


def tokens_in(path: Path) -> int:
    """How many tokens a shard holds. Raises UserError if it is not one, or not whole."""
    with path.open("rb") as file:
        raw = file.read(SHARD_HEADER_BYTES)
    header = np.frombuffer(raw, "<i4") if len(raw) == SHARD_HEADER_BYTES else np.zeros(1, "<i4")
    if header[0] != MAGIC:
        raise UserError(f"{path}: not a token shard of llm.c (its first number is not {MAGIC})")
    if header[1] != VERSION:
        raise UserError(f"{path}: version {header[1]} of the format; only version {VERSION} (uint16 tokens) is known")
    tokens, length = int(header[2]), path.stat().st_size - SHARD_HEADER_BYTES
    if length != 2 * tokens:
        raise UserError(f"{path}: damaged: the header tells of {tokens:,} tokens, but there are {length / 2:,.1f}")
    return tokens


def import_shards(split: str, paths: Sequence[Path], tokenizer: Tokenizer, folder: Path) -> Split:
    """Write the shards' tokens, one after another and unchanged, as the folder's `split`.

    Raises UserError for a shard that is damaged, for tokens that are not the tokenizer's, and if there are none.
    """
    if token_dtype(tokenizer.vocab_size) != SHARD_DTYPE:
        raise UserError(
            f"{paths[0]}: holds {SHARD_DTYPE} tokens, but the tokenizer has {tokenizer.vocab_size:,}, which need more; "
            "give the --tokenizer that the shards were made with"
        )
    lengths = {path: tokens_in(path) for path in paths}
    if not sum(lengths.values()):
        raise UserError(f"{paths[0]}: {split} would have no tokens")
    target = folder / f"{split}.safetensors"
    draft = target.with_suffix(".draft")
    draft.write_bytes(bytes(HEADER_BYTES))
    counts = [0, 0]
    for path, tokens in lengths.items():
        _add_counts(counts, path, tokens, tokenizer)
        copy_range(path, draft, SHARD_HEADER_BYTES, 2 * tokens)
    total = sum(lengths.values())
    write_header(draft, SHARD_DTYPE, total)
    draft.rename(target)
    return Split(split, 0, total, *counts)


def _add_counts(counts: list[int], path: Path, count: int, tokenizer: Tokenizer) -> None:
    byte_lengths = tokenizer.token_byte_lengths()
    for at in range(0, count, COUNTED_TOKENS):
        tokens = np.fromfile(path, "<u2", min(COUNTED_TOKENS, count - at), offset=SHARD_HEADER_BYTES + 2 * at)
        if tokens.max() >= len(byte_lengths):
            raise UserError(f"{path}: token id {tokens.max()} is beyond the tokenizer's {len(byte_lengths):,}")
        counts[0] += int((tokens == tokenizer.eot_token).sum())
        counts[1] += int(byte_lengths[tokens].sum())
