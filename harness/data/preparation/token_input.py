"""Token shards of other programs as a dataset's splits, which the files' names tell.

llm.c and modded-nanogpt write shards: a header of 256 int32 (magic, version, number of tokens), then the tokens, uint16
or, for Llama 3, uint32 (https://github.com/karpathy/llm.c, dev/data/data_common.py, MIT). build-nanogpt saves NumPy
arrays (https://github.com/karpathy/build-nanogpt, fineweb.py, MIT). nanoGPT writes uint16 without a header
(https://github.com/karpathy/nanoGPT, data/openwebtext/prepare.py, MIT), which does not say what the numbers are.

There are as many documents as end-of-text tokens, which nanoGPT writes after each document, and the others before it.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.common.errors import UserError
from harness.common.files import sync
from harness.common.messages import abbreviated, is_unicode
from harness.data.preparation.encode import token_dtype
from harness.data.preparation.splits import Split
from harness.data.preparation.stream import token_file
from harness.data.preparation.text_input import TOKEN_SUFFIXES
from harness.data.tokenizers.tokenizer import Tokenizer

NUMPY_MAGIC = b"\x93NUMPY"
SHARD_HEADER_BYTES = 1024
SHARDS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, tokens
BLOCK_TOKENS = 2**22
SPLIT_WORDS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}


@dataclass(frozen=True)
class TokenShard:
    """The place of a file's tokens, and their dtype."""

    path: Path
    dtype: np.dtype
    offset: int  # bytes before the first
    tokens: int
    is_told: bool = True  # by the file itself

    def blocks(self) -> Iterator[np.ndarray]:
        """The tokens in order, (≤ BLOCK_TOKENS,) of `dtype`. Raises UserError if the file has been cut meanwhile."""
        for at in range(0, self.tokens, BLOCK_TOKENS):
            count = min(BLOCK_TOKENS, self.tokens - at)
            block = np.fromfile(self.path, self.dtype, count, offset=self.offset + at * self.dtype.itemsize)
            if len(block) < count:
                raise UserError(f"{self.path}: has become shorter while it was read")
            yield block


FEWEST_NUMBERS = 16  # at a file's beginning, for a judgement of their width


def open_shard(path: Path, stated_dtype: str | None) -> TokenShard:
    """`stated_dtype` is what the user says of files without a header; None: uint16.

    Raises UserError for a file that is not whole.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(SHARD_HEADER_BYTES)
    if head.startswith(NUMPY_MAGIC):
        return _open_array(path)
    magic = int.from_bytes(head[:4], "little")
    if magic not in SHARDS:
        dtype = np.dtype(stated_dtype or "uint16").newbyteorder("<")
        if size % dtype.itemsize:
            raise UserError(
                f"{path}: no header tells what it holds, and {size:,} bytes are no whole number of {dtype.name}; it is "
                "damaged, or no file of tokens"
            )
        upper_halves = np.frombuffer(head[: len(head) // 4 * 4], "<u2")[1::2]  # if the numbers were of 32 bits or more
        if stated_dtype is None and len(upper_halves) >= FEWEST_NUMBERS and (upper_halves == 0).mean() > 0.5:
            raise UserError(
                f"{path}: read as uint16, every second token is 0: they are wider; give --token-dtype uint32"
            )
        return TokenShard(path, dtype, 0, size // dtype.itemsize, is_told=False)
    if len(head) < SHARD_HEADER_BYTES:
        raise UserError(f"{path}: damaged: it ends within its header")
    _, version, tokens = np.frombuffer(head, "<i4", 3).tolist()
    known, code = SHARDS[magic]
    dtype = np.dtype(code)
    if version != known:
        raise UserError(
            f"{path}: version {version} of the format; only version {known} ({dtype.name} tokens) of magic {magic} is "
            "known"
        )
    there = (size - SHARD_HEADER_BYTES) / dtype.itemsize
    if there != tokens:
        raise UserError(f"{path}: damaged: the header tells of {tokens:,} tokens, but there are {there:,.1f}")
    return TokenShard(path, dtype, SHARD_HEADER_BYTES, tokens)


def _open_array(path: Path) -> TokenShard:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{path}: no NumPy array of tokens, or damaged ({reason})") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(
            f"{path}: holds {array.dtype} in {array.ndim} dimensions; tokens are whole numbers in an array of one"
        )
    return TokenShard(path, array.dtype, array.offset, len(array))


def find_shards(patterns: Sequence[str], stated_dtype: str | None) -> dict[str, list[TokenShard]]:
    """The token files that folders, files and globs stand for, in the order of their names, by the split that the
    names tell. `stated_dtype` is what the user says of files without a header, if anything.

    Raises UserError if there are none, if one is none, or if a name tells of no split or cannot go into meta.json.
    """
    found: set[Path] = set()
    for pattern in patterns:
        place = Path(pattern)
        if place.is_dir():
            paths = [path for path in place.iterdir() if path.suffix.lower() in TOKEN_SUFFIXES and path.is_file()]
        else:
            paths = [place] if place.is_file() else [Path(each) for each in glob.glob(pattern, recursive=True)]
        if not paths:
            raise UserError(f"{pattern}: no .bin or .npy files here (a folder, or a glob in quotes)")
        found |= set(paths)
    shards: dict[str, list[TokenShard]] = {}
    for path in sorted(found):
        if not is_unicode(path.name):
            raise UserError(f"{path}: the name is not valid UTF-8; rename it")
        words = path.stem.lower().replace("-", "_").split("_")
        split = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)
        if split is None:
            raise UserError(f"{path}: the name tells of no split; rename it to something_train_000001.bin or _val_")
        shards.setdefault(split, []).append(open_shard(path, stated_dtype))
    if "train" not in shards:
        raise UserError(f"{abbreviated(patterns)}: no shard for training (train.bin, something_train_000001.npy)")
    return shards


def import_shards(split: str, shards: Sequence[TokenShard], tokenizer: Tokenizer, folder: Path) -> Split:
    """Write the shards' tokens, one after another and unchanged, as the folder's `split`.

    Raises UserError for tokens that are not the tokenizer's, and if there are none.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    for shard in shards:
        if shard.dtype.itemsize < dtype.itemsize:
            raise UserError(
                f"{shard.path}: holds {shard.dtype.name} tokens, but the tokenizer has {tokenizer.vocab_size:,}, which "
                "need more; give the --tokenizer that the shards were made with"
            )
    total = sum(shard.tokens for shard in shards)
    if not total:
        raise UserError(f"{shards[0].path}: {split} would have no tokens")
    byte_lengths = tokenizer.token_byte_lengths()
    documents = length = 0
    with token_file(folder / f"{split}.safetensors", dtype, total) as file:
        for shard in shards:
            for tokens in shard.blocks():
                smallest, largest = int(tokens.min()), int(tokens.max())
                if smallest < 0 or largest >= tokenizer.vocab_size:
                    wrong = smallest if smallest < 0 else largest
                    raise UserError(
                        f"{shard.path}: token id {wrong} is beyond the tokenizer's {tokenizer.vocab_size:,}; give the "
                        f"--tokenizer that the tokens were made with (and --token-dtype if they have no header)"
                    )
                documents += int((tokens == tokenizer.eot_token).sum())
                length += int(byte_lengths[tokens].sum())
                file.write(tokens.astype(dtype, copy=False).data)
    sync(folder)
    return Split(split, 0, total, documents, length)
