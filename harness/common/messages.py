"""Helpers for messages: quotations and checks of text, numbers with units, and layout on a terminal."""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from harness.common.errors import printable

WIDTH = 80  # of a terminal
GAP = "  "  # between two columns of a table
SHOWN_CHARACTERS = 60
REASON_CHARACTERS = 200  # of another library's error, which may quote a damaged file
ALIKE = 0.76  # least similarity (difflib's ratio) of two names; with 0.6, difflib's default, `epochs` would match `eps`
GIB = 2**30
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
LEAST_CENTS = 2  # least number of decimal places of an amount of money
SMALLEST_AMOUNT = 1e-9  # dollars; smaller amounts are shown as 0.00


def tell(text: str) -> None:
    """Print a line (a note or a warning) on standard error at once."""
    print(text, file=sys.stderr, flush=True)


def escape_controls(text: str) -> str:
    """Return the text with control characters escaped, except for newlines and tabs. A model's text may contain any,
    and could clear the terminal."""
    return CONTROLS.sub(lambda found: repr(found.group())[1:-1], text)


def quoted(value: Any) -> str:
    """Return a value of a JSON file as JSON text, cut after SHOWN_CHARACTERS."""
    try:
        text = json.dumps(value, default=str)
    except RecursionError:
        text = "something deeply nested"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the name in `known` that `name` was probably meant to be, or None if there is none."""
    if len(name) > SHOWN_CHARACTERS:  # too long for a typing error, and slow to compare
        return None

    def is_word(word: str, part: str) -> bool:
        if min(len(word), len(part)) > 2 and (word.startswith(part) or part.startswith(word)):  # abbreviated
            return True
        return bool(difflib.get_close_matches(word, [part], cutoff=ALIKE))

    # Similarity alone would suggest `min_lr_ratio` for `mlp_ratio`, another program's key with another meaning.
    def is_meant(candidate: str) -> bool:
        typed, right = name.replace("_", ""), candidate.replace("_", "")
        blocks = difflib.SequenceMatcher(None, typed, right).get_matching_blocks()
        differs_by_one_letter = sum(block.size for block in blocks) >= max(len(typed), len(right)) - 1
        parts = candidate.split("_")
        return differs_by_one_letter or all(any(is_word(word, part) for part in parts) for word in name.split("_"))

    swapped = [each for each in known if sorted(each.lower()) == sorted(name.lower())]
    alike = difflib.get_close_matches(name, known, n=len(known) or 1, cutoff=ALIKE)
    return next(iter(swapped or filter(is_meant, alike)), None)


def abbreviated(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Return the first `most` names joined by `separator`, and the number of the others: "a, b and 3 more"."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def amount_text(dollars: float) -> str:
    """Format dollars to the cent, or below ten cents to two significant digits: 0.0123 -> "0.012"."""
    size = abs(dollars)
    digits = 1 - math.floor(math.log10(size)) if SMALLEST_AMOUNT <= size < math.inf else LEAST_CENTS
    return f"{dollars:,.{max(LEAST_CENTS, digits)}f}"


def duration(seconds: float) -> str:
    """Format seconds as hours, or as seconds if there are fewer than 600."""
    return f"{seconds / 3600:,.2f} h" if seconds >= 600 else f"{seconds:,.0f} s"


def distinct_sizes(needed: int, free: int) -> tuple[str, str]:
    """Format `needed` and `free`, two numbers of bytes, in GiB. If `needed` is less than 1 GiB or the two texts are
    equal, MiB are used, or else bytes."""
    for size, unit in ((GIB, "GiB"), (2**20, "MiB")):
        texts = f"{needed / size:,.2f} {unit}", f"{free / size:,.2f} {unit}"
        if needed >= size and texts[0] != texts[1]:
            return texts
    return f"{needed:,} bytes", f"{free:,} bytes"


def counted(number: int, unit: str) -> str:
    """Return a number with its unit, in the plural unless the number is 1: "1 byte", "1,234 bytes"."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def document_count(documents: int) -> str:
    """Return as text how many documents end in a split: "1,234 documents", or "a part of a document" for 0."""
    return counted(documents, "document") if documents else "a part of a document"


def is_hub_name(text: str) -> bool:
    """Return True if a text has the form owner/name of the Hugging Face Hub."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None


def as_unicode(name: str) -> str:
    """Return a file name, which can hold any bytes, as text that can be encoded, with "?" for bytes that are not
    UTF-8."""
    return name.encode(errors="replace").decode()


def is_unicode(text: str) -> bool:
    """Return True if the text can be encoded. A JSON string can hold a lone surrogate, which has no encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table. `rows` must not be empty. A row has one text for each heading.

    Columns whose heading is in `left` are aligned to the left, others to the right.
    """
    columns = []
    for heading, cells in zip(headings, zip(*rows, strict=True), strict=True):
        width = max(map(len, [*cells, *heading.split()]))
        side = "<" if heading in left else ">"
        lines = textwrap.wrap(heading, width)
        columns.append((width, side, lines, cells))
    height = max(len(lines) for _, _, lines, _ in columns)
    filled = [
        [f"{text:{side}{width}}" for text in (*[""] * (height - len(lines)), *lines, *cells)]
        for width, side, lines, cells in columns
    ]
    for line in zip(*filled, strict=True):
        yield GAP.join(line).rstrip()


def paragraph(text: str, indent: int = 2) -> list[str]:
    """Return the text wrapped to lines of at most WIDTH characters, with control characters escaped.

    The first line keeps the spaces at the beginning of `text`. The others are indented by `indent` spaces.
    """
    words = text.lstrip(" ")
    first, following = text[: len(text) - len(words)], " " * indent
    return textwrap.wrap(
        printable(words), WIDTH, initial_indent=first, subsequent_indent=following, break_on_hyphens=False
    )
