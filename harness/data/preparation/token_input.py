"""Token shards of other programs, imported as the splits of a dataset.

- llm.c and modded-nanogpt: a header of 256 int32 numbers, then tokens of uint16 or, for Llama 3, uint32. The header
  begins with a magic number, the version and the number of tokens (https://github.com/karpathy/llm.c,
  dev/data/data_common.py, MIT).
- build-nanogpt: NumPy arrays (https://github.com/karpathy/build-nanogpt, fineweb.py, MIT).
- nanoGPT: uint16 without a header (https://github.com/karpathy/nanoGPT, data/openwebtext/prepare.py, MIT).

nanoGPT writes an end-of-text token after each document. The other programs write one before each document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.common.errors import UserError
from harness.common.messages import abbreviated, is_unicode
from harness.data.preparation.splits import Split
from harness.data.preparation.stream import token_file
from harness.data.preparation.text_input import TOKEN_SUFFIXES, matching_files
from harness.data.tokenizers import Tokenizer

NUMPY_MAGIC = b"\x93NUMPY"
SHARD_HEADER_BYTES = 1024
SHARDS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: (version, dtype of the tokens)
BLOCK_TOKENS = 2**22
SPLIT_WORDS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
FEWEST_NUMBERS = 16  # a file with fewer numbers does not show whether they are uint16 or uint32


@dataclass(frozen=True)
class TokenShard:
    """File of tokens: the position, number and dtype of its tokens."""

    path: Path
    dtype: np.dtype
    offset: int  # bytes before the first token
    tokens: int  # number of tokens
    has_header: bool = True  # False: the file does not state the dtype


def open_shard(path: Path, stated_dtype: str | None) -> TokenShard:
    """Return the position, number and dtype of the tokens in a file. `stated_dtype` is the user's dtype for files
    without a header; None: uint16. Raises UserError if the file is recognizably damaged, if its format or dtype is not
    supported, or if it looks like uint32 and `stated_dtype` is None."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(SHARD_HEADER_BYTES)
    if head.startswith(NUMPY_MAGIC):
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy parses the header as Python, and lets the parser's errors through
            reason = " ".join(str(error).split())[:120]
            raise UserError(f"{path}: not a NumPy array of tokens, or damaged ({reason}); replace it") from None
        if array.ndim != 1 or array.dtype.kind not in "iu":
            problem = f"holds {array.dtype} in {array.ndim} dimensions"
            raise UserError(f"{path}: {problem}; tokens must be integers in a 1-D array")
        return TokenShard(path, array.dtype, array.offset, len(array))
    magic = int.from_bytes(head[:4], "little")
    if magic not in SHARDS:
        dtype = np.dtype(stated_dtype or "uint16").newbyteorder("<")
        if size % dtype.itemsize:
            raise UserError(
                f"{path}: has no known header, and its {size:,} bytes are not a whole number of {dtype.name} tokens; "
                "it is damaged, of another dtype, or no token file; replace it, leave it out, or correct --token-dtype"
            )
        upper_halves = np.frombuffer(head[: len(head) // 4 * 4], "<u2")[1::2]  # of each number, if it has 32 bits
        if stated_dtype is None and len(upper_halves) >= FEWEST_NUMBERS and (upper_halves == 0).mean() > 0.5:
            raise UserError(
                f"{path}: its tokens look like uint32 (as uint16, most of those at odd positions are 0); give "
                "--token-dtype uint32 or, if that is wrong, --token-dtype uint16"
            )
        return TokenShard(path, dtype, 0, size // dtype.itemsize, has_header=False)
    if len(head) < SHARD_HEADER_BYTES:
        raise UserError(f"{path}: damaged: it ends within its header; copy or make it again")
    _, version, tokens = np.frombuffer(head, "<i4", 3).tolist()
    known, code = SHARDS[magic]
    dtype = np.dtype(code)
    if version != known:
        raise UserError(
            f"{path}: its header has version {version}; of files with magic {magic}, only version {known} "
            f"({dtype.name} tokens) can be read"
        )
    there = (size - SHARD_HEADER_BYTES) / dtype.itemsize
    if there != tokens:
        held = f"{there:,.1f}".removesuffix(".0")
        said = f"the header states {tokens:,} tokens, but the file holds {held}"
        raise UserError(f"{path}: damaged: {said}; copy or make it again")
    return TokenShard(path, dtype, SHARD_HEADER_BYTES, tokens)


def find_shards(patterns: Sequence[str], stated_dtype: str | None) -> dict[str, list[TokenShard]]:
    """Return the token files for `patterns` (folders, files and globs), sorted by path, in a dict by split.

    - The name of each file must contain its split.
    - In a folder, only .bin and .npy files are found, and not those in its subfolders.

    Raises UserError if a pattern matches no file, if a file cannot be used, or if no shard is for training.
    """
    found: set[Path] = set()
    for pattern in patterns:
        paths = matching_files(pattern)
        if Path(pattern).is_dir():
            inside = Path(pattern).iterdir()
            paths = [path for path in inside if path.suffix.lower() in TOKEN_SUFFIXES and not path.is_dir()]
        if not paths:
            raise UserError(f"{pattern}: no .bin or .npy files here; give a folder that has some, or a glob in quotes")
        found |= set(paths)
    shards: dict[str, list[TokenShard]] = {}
    for path in sorted(found):
        if not is_unicode(path.name):
            raise UserError(f"{path}: the name is not valid UTF-8; rename it")
        words = path.stem.lower().replace("-", "_").split("_")
        split = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)
        if split is None:
            raise UserError(f"{path}: the name contains no split; rename it like x_train_000001.bin (or _val_, _test_)")
        shards.setdefault(split, []).append(open_shard(path, stated_dtype))
    if "train" not in shards:
        raise UserError(
            f"{abbreviated(patterns)}: no shard for training; rename one, e.g. to train.bin or x_train_000001.npy"
        )
    return shards


def import_shards(split: str, shards: Sequence[TokenShard], tokenizer: Tokenizer, folder: Path) -> Split:
    """Write the tokens of all shards, in the tokenizer's dtype, to the file of `split` in `folder`. Return the split
    with its counts. Raises UserError if there are no tokens, or if they do not fit the tokenizer."""
    if not any(shard.tokens for shard in shards):
        raise UserError(f"{shards[0].path}: the {split} shards have no tokens; give shards that have some")
    size, byte_lengths = tokenizer.vocab_size, tokenizer.token_byte_lengths()
    tokens = documents = length = 0
    with token_file(folder / f"{split}.safetensors", tokenizer.dtype) as file:
        for shard in shards:
            width = shard.dtype.itemsize
            if width < tokenizer.dtype.itemsize:
                raise UserError(
                    f"{shard.path}: holds {shard.dtype.name} tokens, but the tokenizer has {size:,}, which need a "
                    "wider dtype; give the --tokenizer of the shards (and --token-dtype if they have no header)"
                )
            for at in range(0, shard.tokens, BLOCK_TOKENS):
                count = min(BLOCK_TOKENS, shard.tokens - at)
                block = np.fromfile(shard.path, shard.dtype, count, offset=shard.offset + at * width)
                if len(block) < count:
                    raise UserError(f"{shard.path}: became shorter while it was being read; copy or make it again")
                smallest, largest = int(block.min()), int(block.max())
                if smallest < 0 or largest >= size:
                    raise UserError(
                        f"{shard.path}: token id {smallest if smallest < 0 else largest} is not in the tokenizer's "
                        f"vocabulary of {size:,}; give the --tokenizer that the tokens were made with (and "
                        "--token-dtype if the file has no header)"
                    )
                tokens += count
                documents += int((block == tokenizer.eot_token).sum())
                length += int(byte_lengths[block].sum())
                file.write(block.astype(tokenizer.dtype, copy=False).data)
    return Split(split, 0, tokens, documents, length)
