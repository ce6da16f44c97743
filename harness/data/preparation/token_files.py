"""Files of token ids as other programs write them, of which each becomes a range of numbers in a file.

llm.c and modded-nanogpt write shards: a header of 256 int32 (magic, version, number of tokens), then the tokens, uint16
or, for Llama 3, uint32 (https://github.com/karpathy/llm.c, dev/data/data_common.py, MIT). build-nanogpt saves NumPy
arrays (https://github.com/karpathy/build-nanogpt, fineweb.py, MIT). nanoGPT writes uint16 without a header
(https://github.com/karpathy/nanoGPT, data/openwebtext/prepare.py, MIT): what such a file holds, nothing in it tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.common.errors import UserError
from harness.data.preparation.binary_content import (
    EVALUATION_MAGIC,
    HEAD_BYTES,
    NUMPY_MAGIC,
    SHARD_MAGIC,
    WIDE_SHARD_MAGIC,
    is_text,
    known_format,
)

SHARD_HEADER_BYTES = 1024
SHARDS: dict[int, tuple[int, np.dtype[Any]]] = {  # magic: version, tokens
    SHARD_MAGIC: (1, np.dtype("<u2")),
    WIDE_SHARD_MAGIC: (7, np.dtype("<u4")),
}
BLOCK_TOKENS = 2**22
MOST_ZEROS = 0.9  # of every second number, in a file that is read with the right width
FEWEST_NUMBERS = 8  # to judge a file by
DTYPE_OPTION = "--token-dtype"


@dataclass(frozen=True)
class TokenShard:
    """Where a file's tokens lie, and as what."""

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


def open_shard(path: Path, token_dtype: str | None) -> TokenShard:
    """`token_dtype` is what the user says of files without a header; None: uint16, unless that is surely wrong.

    Raises UserError for a file that is no file of tokens, or not whole.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(NUMPY_MAGIC):
        return _array(path)
    magic = int.from_bytes(head[:4], "little")
    if magic == EVALUATION_MAGIC:
        raise UserError(f"{path}: holds the examples of an evaluation of llm.c, not a stream of tokens; leave it out")
    if magic in SHARDS:
        return _shard(path, head, size)
    return _numbers(path, head, size, token_dtype)


def _array(path: Path) -> TokenShard:
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


def _shard(path: Path, head: bytes, size: int) -> TokenShard:
    if len(head) < SHARD_HEADER_BYTES:
        raise UserError(f"{path}: damaged: it ends within its header")
    magic, version, tokens = np.frombuffer(head, "<i4", 3).tolist()
    known, dtype = SHARDS[magic]
    if version != known:
        raise UserError(
            f"{path}: version {version} of the format; only version {known} ({dtype.name} tokens) of magic {magic} is "
            "known"
        )
    there = (size - SHARD_HEADER_BYTES) / dtype.itemsize
    if there != tokens:
        raise UserError(f"{path}: damaged: the header tells of {tokens:,} tokens, but there are {there:,.1f}")
    return TokenShard(path, dtype, SHARD_HEADER_BYTES, tokens)


def _numbers(path: Path, head: bytes, size: int, token_dtype: str | None) -> TokenShard:
    found = known_format(head, size)
    if found:
        raise UserError(f"{path}: holds {found.what}, not tokens; {found.remedy}")
    if len(head) >= 2 * FEWEST_NUMBERS and is_text(head):
        raise UserError(f"{path}: holds text, not tokens; prepare it without --from-bin")
    dtype = np.dtype(token_dtype or "uint16").newbyteorder("<")
    if size % dtype.itemsize:
        raise UserError(
            f"{path}: no header tells what it holds, and {size:,} bytes are no whole number of {dtype.name}; it is "
            "damaged, or no file of tokens"
        )
    numbers = np.frombuffer(head, dtype, len(head) // dtype.itemsize)
    every_second = numbers[1::2]
    if len(every_second) >= FEWEST_NUMBERS and (every_second == 0).mean() > MOST_ZEROS and token_dtype != "uint16":
        wider = f"give {DTYPE_OPTION} uint32" if token_dtype is None else "write them as uint32 first"
        raise UserError(
            f"{path}: every second number is 0 as {dtype.name}, so that its tokens are wider; {wider}"
            + (f", or {DTYPE_OPTION} uint16 if they are not" if token_dtype is None else "")
        )
    return TokenShard(path, dtype, 0, size // dtype.itemsize, is_told=False)
