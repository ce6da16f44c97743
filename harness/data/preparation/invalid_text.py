"""Bytes that are not UTF-8: read as U+FFFD where the user wants it, and not too many of them unnoticed.

The rule is one of whole files, and is decided while they stream: a continued preparation reads a file from its first
byte again, and so finds the same.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import UserError

REPLACEMENT = "\ufffd"
REPLACEMENT_BYTES = REPLACEMENT.encode()
MOST_REPLACED = 0.01  # of a file's bytes, until the user says once more that it is meant


def replacements(raw: bytes) -> int:
    """How many characters U+FFFD decoding these bytes puts in."""
    return raw.decode(errors="replace").count(REPLACEMENT) - raw.count(REPLACEMENT_BYTES)


@dataclass
class InvalidText:
    """What has been replaced in one file so far, in a file of which `tolerated` may be: a share of its bytes."""

    path: Path
    tolerated: float
    size: int | None  # the bytes that will have been read in the end; None: not known
    read: int = 0
    replaced: int = 0

    @property
    def errors(self) -> str:
        """What decoders call it."""
        return "replace" if self.tolerated else "strict"

    def count(self, replaced: int, read: int) -> None:
        """Take note of `replaced` characters U+FFFD for a part of `read` bytes. Raises UserError as soon as it is
        certain that there are too many in the file."""
        self.replaced += replaced
        self.read += read
        self._check(self.size)

    def finish(self) -> None:
        """Raises UserError if there were too many in the file."""
        self._check(self.read)

    def _check(self, size: int | None) -> None:
        if self.tolerated and size is not None and self.replaced > self.tolerated * size:
            raise UserError(
                f"{self.path}: {self.replaced / max(1, self.read):.1%} of it is not UTF-8 (of the first "
                f"{self.read:,} bytes), more than the {self.tolerated:.0%} of a file that --replace-invalid replaces; "
                f"{CONVERT}, or give --replace-invalid twice if it is meant"
            )


CONVERT = "if it is text, convert it to UTF-8 (iconv -f ITS-ENCODING -t UTF-8); if not, leave it out"


def is_mostly_valid(raw: bytes) -> bool:
    """Whether --replace-invalid would take it for text."""
    return replacements(raw) <= MOST_REPLACED * len(raw)


class Utf8Decoder:
    """Blocks of bytes to text; what is not UTF-8 is replaced and counted, or an error."""

    def __init__(self, invalid: InvalidText) -> None:
        self._invalid = invalid
        self._decoder = codecs.getincrementaldecoder("utf-8")(invalid.errors)
        self._tail = b""  # the beginning, perhaps, of a U+FFFD that was in the file before

    def decode(self, block: bytes, *, final: bool = False) -> str:
        """Raises UnicodeDecodeError, or UserError for too much of it."""
        text = self._decoder.decode(block, final)
        if self._invalid.tolerated:
            seen = self._tail + block
            self._invalid.count(text.count(REPLACEMENT) - seen.count(REPLACEMENT_BYTES), len(block))
            self._tail = seen[-2:]
        return text
