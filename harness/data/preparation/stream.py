"""A token file on its way: tokens of documents one after another, and beside it how long each document is.

The token file is a safetensors file from its first byte on but for the header, whose place is kept free: the number of
tokens is known only at the end.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    length = max(stream.size.documents * ENTRY_DTYPE.itemsize, stream.size.tokens * stream.dtype.itemsize)
    bits = max(0, min(MOST_BUCKETS, -(-length // BUCKET_BYTES)) - 1).bit_length()
    _deal(stream, folder, bits, seed)
    with target.path.open("ab") as tokens, target.index_path.open("ab") as index:
        for bucket in range(2**bits):
            _gather(folder / str(bucket), tokens, index)
    shutil.rmtree(folder)
    target.size = stream.size


def _deal(stream: TokenStream, folder: Path, bits: int, seed: int) -> None:
    random = np.random.Philox(key=seed)  # its raw numbers are the same in every version of numpy
    with ExitStack() as stack:
        tokens, entries = (
            [stack.enter_context((folder / f"{bucket}{kind}").open("wb")) for bucket in range(2**bits)]
            for kind in (".tokens", ".entries")
        )
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
