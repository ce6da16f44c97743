"""Tokenizer of a new dataset: a known encoding, a tokenizer file, or a BPE trained on a sample of the text."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from harness.common.errors import UserError
from harness.common.files import atomic_file, sha256
from harness.data.preparation.encode import batches
from harness.data.preparation.pipeline import Recipe
from harness.data.preparation.splits import SplitSizes, draws
from harness.data.preparation.text_input import Piece, TextSource
from harness.data.tokenizers.load import load_tokenizer
from harness.data.tokenizers.tiktoken_files import SUFFIX, encoding_file, known_encodings

SAMPLE_CHARACTERS = 2**26
SAMPLED_FILES = 16


def check_tokenizer(name: str | None) -> str | None:
    """Check the value of --tokenizer. Return the SHA-256 of the tokenizer file that it names, or None if it names no
    file. Raises UserError if it is neither a tokenizer file nor an encoding of tiktoken."""
    if name is not None and Path(name).is_file():
        load_tokenizer(Path(name))
        return sha256(Path(name))
    if name is not None and name not in (known := known_encodings()):
        raise UserError(f"--tokenizer {name}: no such file, and no encoding of tiktoken; there is {', '.join(known)}")
    return None


def bring_tokenizer(given: str, folder: Path, train: Callable[[Path], None] | None = None) -> str:
    """Write the tokenizer's file into the dataset's folder, except for GPT-2's, and return the tokenizer's name for
    meta.json. If `train` is given, it writes a newly trained tokenizer to a path; otherwise the tokenizer is `given`,
    the value of --tokenizer.

    An interrupted call leaves no partial file. An existing file is used, because the same options made it. Raises
    UserError if the text has too few different words to train on.
    """
    write: Callable[[Path], object]
    if train:
        name, write = "tokenizer.json", train
    elif given == "gpt2":
        return "gpt2"
    elif Path(given).is_file():
        name = Path(given).name if given.endswith(SUFFIX) else "tokenizer.json"
        write = partial(shutil.copyfile, given)
    else:
        name, write = f"{given}{SUFFIX}", lambda draft: draft.write_text(encoding_file(given), encoding="utf-8")
    if not (folder / name).exists():
        # The draft's name keeps its suffix, which tells `load_tokenizer` the format. It contains no process id, so the
        # next call removes the draft of a killed process.
        with atomic_file(folder / name, folder / f".{name}") as draft:
            write(draft)
            load_tokenizer(draft)
    return name


def sample_texts(source: TextSource, recipe: Recipe) -> list[str]:
    """Return the text to train a tokenizer on. Of a small text it is everything except the held-out splits. Of a large
    text it is SAMPLE_CHARACTERS characters, from the beginnings of a few files spread over the text. Raises what
    reading the files raises."""
    files = source.sampled(SAMPLED_FILES)
    is_small = sum(file.size for file in files) <= SAMPLE_CHARACTERS
    most = SAMPLE_CHARACTERS if is_small else SAMPLE_CHARACTERS // len(files)
    pieces: list[Piece] = []
    for file in files:
        of_file = (piece for batch in batches(source.read_file(file, recipe.form)) for piece in batch.pieces)
        pieces += _cut_to(of_file, most)
    characters = sum(len(piece.text) for piece in pieces)
    is_all = len(files) == len(source.files) and characters < most
    if is_all and recipe.sizes.order == "seeded" and (left := _without_drawn(pieces, recipe.sizes)):
        return left
    if recipe.shuffle_seed is None and (is_all or recipe.sizes.order == "given"):  # the last documents are held out
        pieces = list(_cut_to(pieces, round(characters * (1 - recipe.sizes.validation - recipe.sizes.test))))
    return [piece.text for piece in pieces]


def _without_drawn(pieces: list[Piece], sizes: SplitSizes) -> list[str]:
    """Return the texts of the train split, given all pieces of a text, for --split-order seeded. Return an empty list
    if there are too few documents to make the splits of whole documents."""
    ends = np.array([piece.ends for piece in pieces], bool)
    documents = np.cumsum(ends) - ends
    lengths = np.bincount(documents, [len(piece.text.encode()) for piece in pieces]).astype(np.int64)
    pool = np.flatnonzero(sizes.in_pool(0, len(lengths)))
    chosen = sizes.choose(draws(0, len(lengths))[pool], lengths[pool], int(lengths.sum()))
    is_left = np.full(len(lengths), all(map(len, chosen.values())))
    for places in chosen.values():
        is_left[pool[places]] = False
    return [piece.text for piece, document in zip(pieces, documents, strict=True) if is_left[document]]


def _cut_to(pieces: Iterable[Piece], characters: int) -> Iterator[Piece]:
    """Yield the pieces with the first `characters` characters of all pieces; the last of them is shortened."""
    for piece in pieces:
        yield piece._replace(text=piece.text[:characters])
        characters -= len(piece.text)
        if characters <= 0:
            return
