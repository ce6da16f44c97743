"""The tokenizer of a new dataset: a known one, a file, or one trained on a sample of the text."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.batches import batches
from harness.bpe import train_bpe
from harness.errors import UserError
from harness.files import sha256
from harness.preparation import Recipe
from harness.splits import Shares
from harness.text_sources import TextSource, read_file
from harness.tiktoken_encodings import SUFFIX, encoding_file, known_encodings
from harness.tokenizer import load_tokenizer

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

    def bring(self, source: TextSource, recipe: Recipe, folder: Path) -> str:
        """Put the tokenizer's file into the dataset's folder, if it has one: what meta.json calls it.

        An interrupted call leaves no part of a file, and a file that is there is taken: the same options made it.
        Raises UserError for a text with too few different words.
        """
        if self.trained_size is None and (self.name or "gpt2") == "gpt2":
            return "gpt2"
        path = folder / self._file_name()
        if not path.exists():
            draft = path.with_name(f".{path.name}")
            self._write(draft, source, recipe)
            load_tokenizer(draft)
            draft.rename(path)
        return path.name

    def _file_name(self) -> str:
        if self.trained_size is not None:
            return "tokenizer.json"
        if not Path(str(self.name)).is_file():
            return f"{self.name}{SUFFIX}"
        return Path(str(self.name)).name if str(self.name).endswith(SUFFIX) else "tokenizer.json"

    def _write(self, draft: Path, source: TextSource, recipe: Recipe) -> None:
        if self.trained_size is not None:
            texts = sample_texts(source, recipe)
            if recipe.shuffle_seed is None:
                texts = _without_held_out(texts, recipe.shares)
            train_bpe(iter(texts), self.trained_size, draft)
        elif Path(str(self.name)).is_file():
            shutil.copyfile(str(self.name), draft)
        else:
            draft.write_text(encoding_file(str(self.name)), encoding="utf-8")


def sample_texts(source: TextSource, recipe: Recipe) -> list[str]:
    """Texts from the beginnings of a few files spread over the source: all of a small one, 64 Mi characters of a large
    one."""
    files = source.sampled(SAMPLED_FILES)
    return [
        text for file in files for text in _first(_texts(source, recipe, file.number), SAMPLE_CHARACTERS // len(files))
    ]


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
