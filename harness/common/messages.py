"""Text in messages about what a user has written, and checks of its form."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

SHOWN_CHARACTERS = 60
ALIKE = 0.76  # of difflib's ratio: half of it, and `epochs` is like `eps`


def quoted(value: Any) -> str:
    """A value of a JSON file as it is written there, cut to what fits a line."""
    try:
        text = json.dumps(value, default=str)
    except RecursionError:
        text = "something deeply nested"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that was probably meant: one that differs by a typing error or an omitted part; None if there is
    none. A name with a word of its own does not count (`mlp_ratio` beside `min_lr_ratio`): it may be another program's
    for something else."""
    if len(name) > SHOWN_CHARACTERS:  # no slip of the finger, and slow to compare
        return None

    def is_meant(candidate: str) -> bool:
        typed, right = name.replace("_", ""), candidate.replace("_", "")
        blocks = difflib.SequenceMatcher(None, typed, right).get_matching_blocks()
        if sum(block.size for block in blocks) >= max(len(typed), len(right)) - 1:  # one letter differs
            return True
        parts = candidate.split("_")
        return all(difflib.get_close_matches(word, parts, n=1, cutoff=ALIKE) for word in name.split("_"))

    swapped = [each for each in known if sorted(each) == sorted(name)]  # in a short name a large part of it
    alike = difflib.get_close_matches(name, filter(is_meant, known), n=1, cutoff=ALIKE)
    return next(iter(swapped or alike), None)


def abbreviated(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """The first names, and how many there are beyond."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def document_count(documents: int) -> str:
    """The number of documents that end in a split, in words."""
    if documents < 2:
        return "1 document" if documents else "a part of a document"
    return f"{documents:,} documents"


def is_hub_name(text: str) -> bool:
    """True if a text has the form owner/name, by which the Hugging Face Hub knows models and datasets."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None


def as_unicode(name: str) -> str:
    """A file's name, which can be any bytes, as text that every file can take."""
    return name.encode(errors="replace").decode()


def is_unicode(text: str) -> bool:
    """JSON can write a lone surrogate, which no file, terminal or other program can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
