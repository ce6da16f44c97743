"""Pieces of documents, cut and gathered into batches that one worker encodes at a time.

The batches depend on the text alone, never on the number of workers: so does every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.data.preparation.documents import Piece

BATCH_CHARACTERS = 2**20
BATCH_PIECES = 4096
LONGEST_PIECE = 2**20  # characters; longer texts are cut
CUT_SEARCH = 2**16  # characters before a piece's end in which a good place is looked for; without one it is cut anyway


@dataclass(frozen=True)
class Batch:
    """Pieces in their order, and where in the input they end."""

    pieces: list[Piece]
    file: int  # number of the file that is read next
    documents: int  # of that file that have been read by then, those without text too
    empty: int  # documents without text, in this batch
    position: int  # bytes of that file that have been read by then

    @property
    def is_whole(self) -> bool:
        """True if a document ends with the batch: work can be resumed from here."""
        return not self.pieces or self.pieces[-1].ends


def batches(pieces: Iterable[Piece], file: int = 0, documents: int = 0) -> Iterator[Batch]:
    """About a mebibyte of text at a time. Documents without any text are counted and left out.

    The pieces begin in `file`, of which `documents` have been read before. An empty piece of the next file that ends
    nothing tells that a file has ended.
    """
    gathered: list[Piece] = []
    characters = empty = position = 0
    is_open = False  # the document has had text
    for piece in _in_short_pieces(pieces):
        room = BATCH_CHARACTERS
        if piece.file != file:  # a good place to go on from, but many small files want to be one batch
            file, documents, room = piece.file, 0, BATCH_CHARACTERS // 16
        position = piece.position
        documents += piece.ends
        if piece.ends and not piece.text and not is_open:
            empty += 1
        elif piece.text or piece.ends:
            gathered.append(piece)
            characters += len(piece.text)
            is_open = not piece.ends
        if characters >= room or len(gathered) >= BATCH_PIECES:
            yield Batch(gathered, file, documents, empty, position)
            gathered, characters, empty = [], 0, 0
    yield Batch(gathered, file, documents, empty, position)


def _in_short_pieces(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the text in pieces of at most LONGEST_PIECE characters, cut where every tokenizer here cuts it, too."""
    rest = ""
    for piece in pieces:
        if not piece.text and not piece.ends:  # it tells of a file's end
            yield piece
            continue
        text, rest = rest + piece.text, ""
        start = 0
        while len(text) - start > LONGEST_PIECE:
            end = _cutting_place(text, start, start + LONGEST_PIECE)
            yield piece._replace(text=text[start:end], ends=False)
            start = end
        text = text[start:] if start else text
        if piece.ends:
            yield piece._replace(text=text)
        else:  # the next piece may tell where this one can be cut
            rest = text


def _cutting_place(text: str, start: int, end: int) -> int:
    """The last place to cut up to `end`: before a space after something visible, since no pattern that splits text into
    words (GPT-2's, cl100k's, o200k's) has a word across that; before a line's end after a letter or a digit, likewise.
    Without one, `end` itself."""
    for at in range(end, max(start, end - CUT_SEARCH), -1):
        before, after = text[at - 1], text[at]
        if (after == " " and not before.isspace()) or (after in "\r\n" and before.isalnum()):
            return at
    return end
