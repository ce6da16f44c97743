"""A token file on its way: tokens of documents one after another, and beside it how long each document is.

The token file is a safetensors file from its first byte on but for the header, whose place is kept free: the number of
tokens is known only at the end.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from harness.common.files import atomic_file, sync
from harness.data.preparation.encode import Encoded

HEADER_BYTES = 256  # the 8 of the header's length included; tokens that follow are aligned
SAFETENSORS_DTYPES = {"uint16": "U16", "uint32": "U32"}
INDEX_DTYPE = np.dtype(("<i8", 2))  # tokens with end-of-text, UTF-8 bytes of text
COPIED_BYTES = 2**23
DOCUMENTS_PER_READ = 2**16


@dataclass(frozen=True)
class StreamSize:
    """Size of a stream, in documents and tokens."""

    documents: int = 0  # whole ones
    tokens: int = 0

    def __add__(self, other: StreamSize) -> StreamSize:
        return StreamSize(self.documents + other.documents, self.tokens + other.tokens)


class TokenStream:
    """Appending to the two files, and reading them."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path = path
        self.index_path = path.with_suffix(".documents")
        self.dtype = np.dtype(dtype)
        self.size = StreamSize()
        self._open = np.zeros(2, np.int64)  # tokens and bytes of the document that is not whole yet

    def open_at(self, size: StreamSize) -> None:
        """Open the files for appending after `size`, and cut off the rest. Raises OSError if they are shorter."""
        self.size = size
        for path, length in (
            (self.path, HEADER_BYTES + size.tokens * self.dtype.itemsize),
            (self.index_path, size.documents * INDEX_DTYPE.itemsize),
        ):
            path.touch()
            if size.tokens and path.stat().st_size < length:
                raise FileNotFoundError(2, "shorter than the journal says", str(path))
            os.truncate(path, length)
        self._tokens = self.path.open("ab")
        self._index = self.index_path.open("ab")

    def append(self, encoded: Encoded, chosen: np.ndarray | None = None) -> None:
        """Add a batch's tokens and the sizes of the documents that ended with them. `chosen`, (pieces,) bool: add these
        pieces only."""
        tokens, sizes, ends = encoded.tokens, encoded.sizes, encoded.ends
        if chosen is not None and not chosen.all():
            tokens, sizes, ends = tokens[np.repeat(chosen, sizes[:, 0])], sizes[chosen], ends[chosen]
        self._tokens.write(tokens.data)
        sums = np.cumsum(sizes, axis=0) + self._open
        at_ends = sums[ends]
        documents = np.diff(at_ends, axis=0, prepend=np.zeros((1, 2), np.int64))
        self._index.write(documents.astype(INDEX_DTYPE.base).tobytes())
        if len(sums):
            self._open = sums[-1] - (at_ends[-1] if len(at_ends) else 0)
        self.size = StreamSize(self.size.documents + len(documents), self.size.tokens + len(tokens))

    def append_documents(self, source: TokenStream, sizes: np.ndarray, places: np.ndarray) -> None:
        """Add the documents of another stream at these places among all of its, (documents, 2) `sizes`."""
        copy_documents(source.path, sizes[:, 0] * self.dtype.itemsize, places, self._tokens, HEADER_BYTES)
        self._index.write(sizes[places].astype(INDEX_DTYPE.base).tobytes())
        self.size += StreamSize(len(places), int(sizes[places, 0].sum()))

    def flush(self) -> None:
        """Have everything on the disk itself."""
        for file in (self._tokens, self._index):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self._tokens.close()
        self._index.close()

    def delete(self) -> None:
        """Remove both files, if they are there."""
        for path in (self.path, self.index_path):
            path.unlink(missing_ok=True)

    def documents(self) -> Iterator[np.ndarray]:
        """The sizes of the documents in order, many at a time: (documents, 2) int64, tokens and bytes."""
        with self.index_path.open("rb") as file:
            while block := file.read(DOCUMENTS_PER_READ * INDEX_DTYPE.itemsize):
                yield np.frombuffer(block, "<i8").reshape(-1, 2)


@contextmanager
def token_file(path: Path, dtype: np.dtype, tokens: int) -> Iterator[BinaryIO]:
    """A token file that appears whole when the body has written its tokens."""
    with atomic_file(path, path.with_suffix(".draft")) as draft:
        with draft.open("wb") as file:
            file.write(bytes(HEADER_BYTES))
            yield file
        write_header(draft, dtype, tokens)


def write_header(path: Path, dtype: np.dtype, tokens: int) -> None:
    """Make a file with a free header and `tokens` tokens, cut after them, a safetensors file."""
    length = tokens * dtype.itemsize
    entry: dict[str, Any] = {"dtype": SAFETENSORS_DTYPES[dtype.name], "shape": [tokens], "data_offsets": [0, length]}
    text = json.dumps({"tokens": entry}, separators=(",", ":")).encode()
    header = (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)
    with path.open("r+b") as file:
        file.write(header)
        file.truncate(HEADER_BYTES + length)
    sync(path)


def copy_documents(source: Path, lengths: np.ndarray, order: np.ndarray, target: BinaryIO, start: int = 0) -> None:
    """Append the documents that lie in a file from byte `start` on, each `lengths` bytes long, in this order."""
    starts = start + np.cumsum(lengths) - lengths
    with source.open("rb", buffering=0) as file:
        for at in range(0, len(order), DOCUMENTS_PER_READ):  # as Python numbers, all of them would take half a GiB
            chosen = order[at : at + DOCUMENTS_PER_READ]
            for place, length in zip(starts[chosen].tolist(), lengths[chosen].tolist(), strict=True):
                file.seek(place)
                copy(file, target, length)


def copy(source: BinaryIO, target: BinaryIO, length: int) -> None:
    """Append so many bytes, from where `source` stands."""
    while length > 0:
        block = source.read(min(length, COPIED_BYTES))
        if not block:
            raise EOFError("a token stream is shorter than its documents")
        target.write(block)
        length -= len(block)


BUCKET_BYTES = 2**26  # small enough that the system keeps one in its cache while it is read in random order
MOST_BUCKETS = 256  # open files


def shuffle(stream: TokenStream, target: TokenStream, seed: int) -> None:
    """Write the documents of `stream` to `target` in an order that is uniformly random by `seed`.

    Each document has a random 64-bit key. They are dealt out into buckets by their keys' first bits, in one pass, and
    each bucket is then read in the order of its keys; of equal keys, the document that came first. Takes twice the
    stream's space on the disk in addition to its own.
    """
    folder = target.path.with_suffix(".buckets")
    shutil.rmtree(folder, ignore_errors=True)  # an interrupted shuffle's
    folder.mkdir()
    length = max(stream.size.documents * INDEX_DTYPE.itemsize, stream.size.tokens * stream.dtype.itemsize)
    bits = max(0, min(MOST_BUCKETS, -(-length // BUCKET_BYTES)) - 1).bit_length()
    # The raw numbers are the same in every version of numpy.
    keys = np.random.Philox(key=seed).random_raw(stream.size.documents)
    owners = keys >> np.uint64(64 - bits) if bits else np.zeros_like(keys)
    buckets = [TokenStream(folder / f"{number}.tokens", stream.dtype) for number in range(2**bits)]
    for each in (target, *buckets):
        each.open_at(StreamSize())
    first = 0
    with stream.path.open("rb") as source:
        source.seek(HEADER_BYTES)
        for sizes in stream.documents():
            bytes_of = (sizes[:, 0] * stream.dtype.itemsize).tolist()
            numbers = owners[first : first + len(sizes)].tolist()
            for number, document, length in zip(numbers, sizes, bytes_of, strict=True):
                copy(source, buckets[number]._tokens, length)
                buckets[number]._index.write(document.tobytes())
            first += len(sizes)
    for number, bucket in enumerate(buckets):
        bucket.close()
        sizes = np.concatenate([np.zeros((0, 2), np.int64), *bucket.documents()])
        target.append_documents(bucket, sizes, np.argsort(keys[owners == number], kind="stable"))
        bucket.delete()
    target.close()
    shutil.rmtree(folder)
