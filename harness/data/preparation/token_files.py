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

NUMPY_MAGIC = b"\x93NUMPY"
SHARD_HEADER_BYTES = 1024
SHARDS: dict[int, tuple[int, np.dtype[Any]]] = {  # magic: version, tokens (llm.c, dev/data/data_common.py)
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}
BLOCK_TOKENS = 2**22
DTYPE_OPTION = "--token-dtype"


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


def open_shard(path: Path, token_dtype: str | None) -> TokenShard:
    """`token_dtype` is what the user says of files without a header; None: uint16.

    Raises UserError for a file that is not whole.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(SHARD_HEADER_BYTES)
    if head.startswith(NUMPY_MAGIC):
        return _array(path)
    magic = int.from_bytes(head[:4], "little")
    if magic in SHARDS:
        return _shard(path, head, size)
    dtype = np.dtype(token_dtype or "uint16").newbyteorder("<")
    if size % dtype.itemsize:
        raise UserError(
            f"{path}: no header tells what it holds, and {size:,} bytes are no whole number of {dtype.name}; it is "
            "damaged, or no file of tokens"
        )
    return TokenShard(path, dtype, 0, size // dtype.itemsize, is_told=False)


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
