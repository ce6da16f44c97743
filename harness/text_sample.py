"""What a tokenizer is trained on: a sample of the text that a dataset is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.batches import batches
from harness.preparation import Recipe
from harness.splits import Shares
from harness.text_sources import TextSource, read_file

SAMPLE_CHARACTERS = 2**26
SAMPLED_FILES = 16


def sample_texts(source: TextSource, recipe: Recipe) -> list[str]:
    """Texts from the beginnings of a few files spread over the source: all of a small one but for what the splits hold
    out, 64 Mi characters of a large one. Raises what reading raises."""
    files = source.sampled(SAMPLED_FILES)
    texts = [
        text for file in files for text in _first(_texts(source, recipe, file.number), SAMPLE_CHARACTERS // len(files))
    ]
    return texts if recipe.shuffle_seed is not None else _without_held_out(texts, recipe.shares)


def _texts(source: TextSource, recipe: Recipe, number: int) -> Iterator[str]:
    for batch in batches(read_file(source, recipe.form, source.files[number])):
        for piece in batch.pieces:
            yield piece.text


def _without_held_out(texts: list[str], shares: Shares) -> list[str]:
    """Without the last part: if the sample is all there is, the splits hold that out."""
    return list(_first(texts, round(sum(map(len, texts)) * (1 - shares.validation - shares.test))))


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
