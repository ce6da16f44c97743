"""The tokenizer of a new data set: one that is known, one from a file, or one trained on a sample of the text, which
is taken here, too, without what the splits will hold out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import UserError
from harness.common.files import atomic_file, sha256
from harness.data.preparation.batches import batches
from harness.data.preparation.pipeline import Recipe
from harness.data.preparation.sources import TextSource, read_file
from harness.data.preparation.splits import SplitSizes
from harness.data.tokenizers.bpe import train_bpe
from harness.data.tokenizers.load import load_tokenizer
from harness.data.tokenizers.tiktoken_files import SUFFIX, encoding_file, known_encodings

SAMPLE_CHARACTERS = 2**26
SAMPLED_FILES = 16


@dataclass(frozen=True)
class TokenizerChoice:
    """What the user asked for: a name or a file, or a number of tokens to train."""

    name: str | None
    trained_size: int | None

    def check(self) -> str | None:
        """The SHA-256 of the user's file, if it is one. Raises UserError for what is no tokenizer."""
        if self.name is not None and Path(self.name).is_file():
            load_tokenizer(Path(self.name))
            return sha256(Path(self.name))
        if self.name is not None and self.name not in known_encodings():
            raise UserError(
                f"--tokenizer {self.name}: no such file, and no encoding of tiktoken; there is "
                f"{', '.join(known_encodings())}"
            )
        return None

    def bring(self, sample: Callable[[], list[str]], folder: Path) -> str:
        """Put the tokenizer's file into the dataset's folder, if it has one: what meta.json calls it.

        `sample` gives the texts to train one on, and is called for that alone.

        An interrupted call leaves no part of a file, and a file that is there is taken: the same options made it.
        Raises UserError for a text with too few different words.
        """
        if self.trained_size is None and (self.name or "gpt2") == "gpt2":
            return "gpt2"
        path = folder / self._file_name()
        if not path.exists():
            # The name's end tells the format; without a process's number, what a killed one left is found again.
            with atomic_file(path, path.with_name(f".{path.name}")) as draft:
                self._write_file(draft, sample)
                load_tokenizer(draft)
        return path.name

    def _file_name(self) -> str:
        if self.trained_size is not None:
            return "tokenizer.json"
        if not Path(str(self.name)).is_file():
            return f"{self.name}{SUFFIX}"
        return Path(str(self.name)).name if str(self.name).endswith(SUFFIX) else "tokenizer.json"

    def _write_file(self, draft: Path, sample: Callable[[], list[str]]) -> None:
        if self.trained_size is not None:
            train_bpe(iter(sample()), self.trained_size, draft)
        elif Path(str(self.name)).is_file():
            shutil.copyfile(str(self.name), draft)
        else:
            draft.write_text(encoding_file(str(self.name)), encoding="utf-8")


def sample_texts(source: TextSource, recipe: Recipe) -> list[str]:
    """Texts from the beginnings of a few files spread over the source: all of a small one but for what the splits hold
    out, 64 Mi characters of a large one. Raises what reading raises."""
    files = source.sampled(SAMPLED_FILES)
    texts = [
        text for file in files for text in _cut_to(_texts(source, recipe, file.number), SAMPLE_CHARACTERS // len(files))
    ]
    return texts if recipe.shuffle_seed is not None else _without_held_out(texts, recipe.sizes)


def _texts(source: TextSource, recipe: Recipe, number: int) -> Iterator[str]:
    for batch in batches(read_file(source, recipe.form, source.files[number])):
        for piece in batch.pieces:
            yield piece.text


def _without_held_out(texts: list[str], sizes: SplitSizes) -> list[str]:
    """Without the last part: if the sample is all there is, the splits hold that out."""
    return list(_cut_to(texts, round(sum(map(len, texts)) * (1 - sizes.validation - sizes.test))))


def _cut_to(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The first so many characters of all texts together."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
