"""Token stream: a file with the tokens of all documents, one after another, and an index file with each document's
size.

The token file has the layout of a safetensors file. Its header is blank until `write_header` is called.
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

from harness.common.errors import RunError
from harness.common.files import atomic_file, sync
from harness.data.preparation.encode import Encoded

HEADER_BYTES = 256  # including the 8 bytes of the header's length; the tokens after it are aligned
INDEX_DTYPE = np.dtype(("<i8", 2))  # per document: tokens with end-of-text, UTF-8 bytes of text
COPIED_BYTES = 2**23
DOCUMENTS_PER_READ = 2**16


@dataclass(frozen=True)
class StreamSize:
    """Size of a stream, in documents and tokens."""

    documents: int = 0  # complete documents
    tokens: int = 0

    def __add__(self, other: StreamSize) -> StreamSize:
        return StreamSize(self.documents + other.documents, self.tokens + other.tokens)


class TokenStream:
    """Token file and index file of a sequence of documents, for appending and reading.

    Call `open_at` before appending, and `flush` or `close` before reading what was appended. To read the files of an
    interrupted process, set `size`.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        """Set the paths. `dtype` is the tokens' dtype."""
        self.path = path
        self.index_path = path.with_suffix(".documents")
        self.dtype = np.dtype(dtype)
        self.size = StreamSize()
        self._open = np.zeros(2, np.int64)  # tokens and bytes of a document whose end is not yet appended

    def open_at(self, size: StreamSize) -> None:
        """Open the files for appending after `size`, and cut off everything beyond `size`. Raises RunError if a file is
        shorter than `size`."""
        self.size = size
        for path, length in (
            (self.path, HEADER_BYTES + size.tokens * self.dtype.itemsize),
            (self.index_path, size.documents * INDEX_DTYPE.itemsize),
        ):
            path.touch()
            if size.tokens and path.stat().st_size < length:
                raise RunError(f"{path}: shorter than journal.json says; begin again with --restart")
            os.truncate(path, length)
        self._tokens = self.path.open("ab")
        self._index = self.index_path.open("ab")

    def append(self, encoded: Encoded, chosen: np.ndarray) -> None:
        """Append the chosen pieces of a batch. `chosen` is (pieces,) bool."""
        tokens, sizes, ends = encoded.tokens, encoded.sizes, encoded.ends
        if not chosen.all():
            tokens, sizes, ends = tokens[np.repeat(chosen, sizes[:, 0])], sizes[chosen], ends[chosen]
        self._tokens.write(tokens.data)
        sums = np.cumsum(sizes, axis=0) + self._open
        at_ends = sums[ends]
        documents = np.diff(at_ends, axis=0, prepend=np.zeros((1, 2), np.int64))
        self._index.write(documents.astype(INDEX_DTYPE.base).tobytes())
        if len(sums):
            self._open = sums[-1] - (at_ends[-1] if len(at_ends) else 0)
        self.size = StreamSize(self.size.documents + len(documents), self.size.tokens + len(tokens))

    def append_documents(self, source: TokenStream, places: np.ndarray) -> None:
        """Append documents of the stream `source`: those with the numbers `places`, in this order."""
        sizes = source.documents()
        copy_documents(source.path, sizes[:, 0] * self.dtype.itemsize, places, self._tokens)
        self._index.write(sizes[places].astype(INDEX_DTYPE.base).tobytes())
        self.size += StreamSize(len(places), int(sizes[places, 0].sum()))

    def flush(self) -> None:
        """Flush both files to the disk (fsync)."""
        for file in (self._tokens, self._index):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self._tokens.close()
        self._index.close()

    def delete(self) -> None:
        """Delete both files if they exist."""
        for path in (self.path, self.index_path):
            path.unlink(missing_ok=True)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the tokens from position `start` on, (count,); fewer at the end."""
        count = max(0, min(count, self.size.tokens - start))
        return np.fromfile(self.path, self.dtype, count, offset=HEADER_BYTES + start * self.dtype.itemsize)

    def documents(self) -> np.ndarray:
        """Return the sizes of the documents in order, (documents, 2) int64: tokens and bytes."""
        return np.fromfile(self.index_path, "<i8").reshape(-1, 2)


@contextmanager
def token_file(path: Path, dtype: np.dtype) -> Iterator[BinaryIO]:
    """Yield a draft file to which the `with` body writes tokens of `dtype`. After the body, the draft is renamed to
    `path`."""
    with atomic_file(path, path.with_suffix(".draft")) as draft:
        with draft.open("wb") as file:
            file.write(bytes(HEADER_BYTES))
            yield file
            tokens = (file.tell() - HEADER_BYTES) // dtype.itemsize
        write_header(draft, dtype, tokens)


def write_header(path: Path, dtype: np.dtype, tokens: int) -> None:
    """Fill in the blank header of a file that holds at least `tokens` tokens, cut off anything after these tokens, and
    flush the file to the disk (fsync)."""
    length = tokens * dtype.itemsize
    entry: dict[str, Any] = {"dtype": f"U{8 * dtype.itemsize}", "shape": [tokens], "data_offsets": [0, length]}
    text = json.dumps({"tokens": entry}, separators=(",", ":")).encode()
    header = (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)
    with path.open("r+b") as file:
        file.write(header)
        file.truncate(HEADER_BYTES + length)
    sync(path)


def copy_documents(source: Path, lengths: np.ndarray, order: np.ndarray, target: BinaryIO) -> None:
    """Append documents of the token file `source` to `target`: those with the numbers `order`, in this order. `lengths`
    has the length in bytes of each document of `source`, chosen or not."""
    starts = HEADER_BYTES + np.cumsum(lengths) - lengths
    with source.open("rb", buffering=0) as file:
        for at in range(0, len(order), DOCUMENTS_PER_READ):  # in blocks; the complete lists would take half a GiB
            chosen = order[at : at + DOCUMENTS_PER_READ]
            for place, length in zip(starts[chosen].tolist(), lengths[chosen].tolist(), strict=True):
                file.seek(place)
                copy(file, target, length)


def copy(source: BinaryIO, target: BinaryIO, length: int) -> None:
    """Append the next `length` bytes of `source` to `target`. Raises RunError if `source` is shorter."""
    while length > 0:
        block = source.read(min(length, COPIED_BYTES))
        if not block:
            raise RunError(f"{source.name}: shorter than recorded; begin again with --restart")
        target.write(block)
        length -= len(block)


BUCKET_BYTES = 2**26  # small enough that a bucket stays in the system's file cache while it is read in random order
MOST_BUCKETS = 256  # limits the number of open files


def shuffle(stream: TokenStream, target: TokenStream, seed: int) -> None:
    """Write the documents of `stream` to `target` in a uniformly random order that `seed` determines. This needs disk
    space for `target` and a little more."""
    folder = target.path.with_suffix(".buckets")
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted shuffle
    folder.mkdir()
    file_bytes = max(stream.size.documents * INDEX_DTYPE.itemsize, stream.size.tokens * stream.dtype.itemsize)
    bits = max(0, min(MOST_BUCKETS, -(-file_bytes // BUCKET_BYTES)) - 1).bit_length()
    # Philox's raw numbers are the same in every version of numpy.
    keys = np.random.Philox(key=seed).random_raw(stream.size.documents)
    owners = keys >> np.uint64(64 - bits) if bits else np.zeros_like(keys)
    # One pass distributes the documents over bucket files by the first bits of their keys. Then each bucket is read in
    # the order of the keys, and deleted.
    buckets = [TokenStream(folder / f"{number}.tokens", stream.dtype) for number in range(2**bits)]
    for each in (target, *buckets):
        each.open_at(StreamSize())
    documents = stream.documents()
    with stream.path.open("rb") as source:
        source.seek(HEADER_BYTES)
        for first in range(0, len(documents), DOCUMENTS_PER_READ):
            sizes = documents[first : first + DOCUMENTS_PER_READ]
            lengths = (sizes[:, 0] * stream.dtype.itemsize).tolist()
            numbers = owners[first : first + len(sizes)].tolist()
            for number, document, length in zip(numbers, sizes, lengths, strict=True):
                copy(source, buckets[number]._tokens, length)
                buckets[number]._index.write(document.tobytes())
    for number, bucket in enumerate(buckets):
        bucket.close()
        target.append_documents(bucket, np.argsort(keys[owners == number], kind="stable"))
        bucket.delete()
    target.flush()  # before `stream` may be deleted
    target.close()
    shutil.rmtree(folder)
