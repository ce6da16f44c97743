"""Tokenizer of a new dataset: a known encoding, a tokenizer file, or a BPE trained on a sample of the text."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from harness.common.errors import UserError
from harness.common.files import atomic_file, sha256
from harness.data.preparation.encode import batches
from harness.data.preparation.splits import SplitRules, draws
from harness.data.preparation.text_input import Piece, TextFormat, TextSource
from harness.data.tokenizers import TIKTOKEN_SUFFIX, encoding_file, load_tokenizer

SAMPLE_CHARACTERS = 2**26


def check_tokenizer(name: str | None) -> str | None:
    """Return the SHA-256 of the tokenizer file `name`, or None if `name` is None or an encoding of tiktoken. `name` is
    the value of --tokenizer. Raises UserError if `name` is anything else, or if the file cannot be used."""
    if name is None:
        return None
    if Path(name).is_file():
        load_tokenizer(Path(name))
        return sha256(Path(name))
    import tiktoken

    known = sorted(tiktoken.list_encoding_names())
    if name not in known:
        there = ", ".join(known)
        raise UserError(
            f"--tokenizer {name}: neither a file (tokenizer.json) nor an encoding of tiktoken, which has {there}"
        )
    return None


def write_tokenizer(given: str, folder: Path, train: Callable[[Path], None] | None = None) -> str | Path:
    """Write the tokenizer's file to `folder`, the dataset's folder, and return the file's path. For GPT-2's tokenizer,
    write nothing and return "gpt2".

    - `given`: value of --tokenizer, ignored with `train`.
    - `train`: function that trains a tokenizer and writes it to a given path.

    An existing file is kept. The caller must make sure that the same options made it. Raises UserError if the tokenizer
    cannot be obtained or used.
    """
    if given == "gpt2" and not train:
        return "gpt2"
    name = "tokenizer.json"
    if not train and not Path(given).is_file():
        name = f"{given}{TIKTOKEN_SUFFIX}"
    elif not train and given.endswith(TIKTOKEN_SUFFIX):
        name = Path(given).name
    if not (folder / name).exists():
        # The temporary file's name keeps the suffix, from which `load_tokenizer` recognizes the format. The name
        # contains no process id, so that the next call removes the temporary file of a killed process.
        with atomic_file(folder / name, folder / f".{name}") as draft:
            if train:
                train(draft)
            elif Path(given).is_file():
                shutil.copyfile(given, draft)
            else:
                draft.write_text(encoding_file(given), encoding="utf-8")
            load_tokenizer(draft)
    return folder / name


def sample_texts(source: TextSource, form: TextFormat, rules: SplitRules) -> list[str]:
    """Return the text to train a tokenizer on, in pieces: the beginnings of the files that `source.sampled` chooses.

    If the sample is the whole text, and --exclude, --max-documents and --max-tokens are not given, documents that
    `hold_out` will choose are left out. In all other cases, held-out text may be in the sample.
    """
    files = source.sampled()
    are_small = sum(file.size for file in files) <= SAMPLE_CHARACTERS
    most = SAMPLE_CHARACTERS if are_small else SAMPLE_CHARACTERS // len(files)
    pieces: list[Piece] = []
    for file in files:
        of_file = (piece for batch in batches(source.read_file(file, form)) for piece in batch.pieces)
        pieces += _cut_to(of_file, most)
    characters = sum(len(piece.text) for piece in pieces)
    is_all = len(files) == len(source.files) and characters < most
    # Leave out the documents that `hold_out` will choose. If it will choose none, because a split would be empty, the
    # text's end will be held out.
    if is_all and rules.order == "seeded":
        ends = np.array([piece.ends for piece in pieces], bool)
        numbers = np.cumsum(ends) - ends
        lengths = np.bincount(numbers, [len(piece.text.encode()) for piece in pieces]).astype(np.int64)
        pool = np.flatnonzero(rules.in_pool(0, len(lengths)))
        chosen = rules.choose(draws(0, len(lengths))[pool], lengths[pool], int(lengths.sum()))
        held_out = {int(pool[place]) for places in chosen.values() for place in places}
        if all(map(len, chosen.values())) and len(held_out) < len(lengths):
            numbered = zip(pieces, numbers.tolist(), strict=True)
            return [piece.text for piece, number in numbered if number not in held_out]
    if rules.shuffle_seed is None and (is_all or rules.order == "given"):  # leave out the text's end
        pieces = list(_cut_to(pieces, round(characters * (1 - rules.validation - rules.test))))
    return [piece.text for piece in pieces]


def _cut_to(pieces: Iterable[Piece], characters: int) -> Iterator[Piece]:
    """Yield the first `characters` characters of the pieces."""
    for piece in pieces:
        yield piece._replace(text=piece.text[:characters])
        characters -= len(piece.text)
        if characters <= 0:
            return
