"""Shuffling the documents of a token stream in bounded memory, the same way for the same seed."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from harness.data.preparation.token_stream import (
    HEADER_BYTES,
    INDEX_DTYPE,
    TokenStream,
    copy,
    copy_documents,
)

BUCKET_BYTES = 2**26  # small enough that the system keeps one in its cache while it is read in random order
MOST_BUCKETS = 256  # open files
ENTRY_DTYPE = np.dtype(("<u8", 3))  # key, tokens, bytes of text


def shuffle(stream: TokenStream, target: TokenStream, seed: int) -> None:
    """Write the documents of `stream` into the empty `target` in an order that is uniformly random by `seed`.

    Each document has a random 64-bit key. They are dealt out into buckets by their keys' first bits, in one pass, and
    each bucket is then read in the order of its keys. Takes twice the stream's space on the disk in addition to its
    own.
    """
    folder = target.path.with_suffix(".buckets")
    shutil.rmtree(folder, ignore_errors=True)  # an interrupted shuffle's
    folder.mkdir()
    entries = stream.size.documents * ENTRY_DTYPE.itemsize
    bits = _bucket_bits(max(entries, stream.size.tokens * stream.dtype.itemsize))
    _deal(stream, folder, bits, seed)
    with target.path.open("ab") as tokens, target.index_path.open("ab") as index:
        for bucket in range(2**bits):
            _gather(folder / str(bucket), tokens, index)
    shutil.rmtree(folder)
    target.size = stream.size


def _bucket_bits(length: int) -> int:
    wanted = min(MOST_BUCKETS, -(-length // BUCKET_BYTES))
    return max(0, wanted - 1).bit_length()


def _deal(stream: TokenStream, folder: Path, bits: int, seed: int) -> None:
    random = np.random.Philox(key=seed)  # its raw numbers are the same in every version of numpy
    with ExitStack() as stack:

        def opened(bucket: int, kind: str) -> BinaryIO:
            return stack.enter_context((folder / f"{bucket}{kind}").open("wb"))

        tokens = [opened(bucket, ".tokens") for bucket in range(2**bits)]
        entries = [opened(bucket, ".entries") for bucket in range(2**bits)]
        source = stack.enter_context(stream.path.open("rb"))
        source.seek(HEADER_BYTES)
        for sizes in stream.documents():
            keys = random.random_raw(len(sizes))
            table = np.column_stack([keys, sizes.astype(np.uint64)]).astype("<u8")
            places = (keys >> np.uint64(64 - bits)).tolist() if bits else [0] * len(keys)
            for place, length, entry in zip(places, (sizes[:, 0] * stream.dtype.itemsize).tolist(), table, strict=True):
                copy(source, tokens[place], length)
                entries[place].write(entry.tobytes())


def _gather(bucket: Path, tokens: BinaryIO, index: BinaryIO) -> None:
    """Append a bucket's documents in the order of their keys; of equal keys, the one that came first."""
    table = np.fromfile(bucket.with_suffix(".entries"), ENTRY_DTYPE).reshape(-1, 3)
    itemsize = bucket.with_suffix(".tokens").stat().st_size // max(1, int(table[:, 1].sum()))
    lengths = table[:, 1].astype(np.int64) * itemsize
    order = np.argsort(table[:, 0], kind="stable")
    copy_documents(bucket.with_suffix(".tokens"), lengths, order, tokens)
    index.write(table[order, 1:].astype(INDEX_DTYPE.base).tobytes())
    for suffix in (".tokens", ".entries"):
        os.unlink(bucket.with_suffix(suffix))
