"""A token file on its way: tokens of documents one after another, and beside it how long each document is.

The token file is a safetensors file from its first byte on but for the header, whose place is kept free: the number of
tokens is known only at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.common.files import sync
from harness.data.preparation.encoding import Encoded

HEADER_BYTES = 256  # the 8 of the header's length included; tokens that follow are aligned
SAFETENSORS_DTYPES = {"uint16": "U16", "uint32": "U32"}
INDEX_DTYPE = np.dtype(("<i8", 2))  # tokens with end-of-text, UTF-8 bytes of text
COPIED_BYTES = 2**23
DOCUMENTS_PER_READ = 2**16


@dataclass(frozen=True)
class StreamSize:
    """How much there is of a stream."""

    documents: int = 0  # whole ones
    tokens: int = 0


class TokenStream:
    """Appending to the two files, and reading them."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path = path
        self.index_path = path.with_suffix(".documents")
        self.dtype = np.dtype(dtype)
        self.size = StreamSize()
        self._open = np.zeros(2, np.int64)  # tokens and bytes of the document that is not whole yet

    def open_at(self, size: StreamSize) -> None:
        """Go on from `size`: what was appended after that is cut off, and what is missing makes an OSError."""
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

    def append(self, encoded: Encoded) -> None:
        """Add a batch's tokens and the sizes of the documents that ended with them."""
        self._tokens.write(encoded.tokens.data)
        sums = np.cumsum(encoded.sizes, axis=0) + self._open
        at_ends = sums[encoded.ends]
        documents = np.diff(at_ends, axis=0, prepend=np.zeros((1, 2), np.int64))
        self._index.write(documents.astype(INDEX_DTYPE.base).tobytes())
        if len(sums):
            self._open = sums[-1] - (at_ends[-1] if len(at_ends) else 0)
        self.size = StreamSize(self.size.documents + len(documents), self.size.tokens + len(encoded.tokens))

    def flush(self) -> None:
        """Have everything on the disk itself."""
        for file in (self._tokens, self._index):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self._tokens.close()
        self._index.close()

    def documents(self) -> Iterator[np.ndarray]:
        """The sizes of the documents in order, many at a time: (documents, 2) int64, tokens and bytes."""
        with self.index_path.open("rb") as file:
            while block := file.read(DOCUMENTS_PER_READ * INDEX_DTYPE.itemsize):
                yield np.frombuffer(block, "<i8").reshape(-1, 2)


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


def copy_range(source: Path, target: Path, start: int, length: int) -> None:
    """Append `length` bytes from byte `start` of a file to another."""
    with source.open("rb") as read, target.open("ab") as write:
        read.seek(start)
        while length > 0:
            block = read.read(min(length, COPIED_BYTES))
            if not block:
                raise EOFError(f"{source} ends early")
            write.write(block)
            length -= len(block)
