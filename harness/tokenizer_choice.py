"""The tokenizer of a new dataset: a known one, a file, or one that is trained for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.bpe import train_bpe
from harness.errors import UserError
from harness.files import sha256
from harness.tiktoken_encodings import SUFFIX, encoding_file, known_encodings
from harness.tokenizer import load_tokenizer


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
            draft = path.with_name(f".{path.name}")
            self._write(draft, sample)
            load_tokenizer(draft)
            draft.rename(path)
        return path.name

    def _file_name(self) -> str:
        if self.trained_size is not None:
            return "tokenizer.json"
        if not Path(str(self.name)).is_file():
            return f"{self.name}{SUFFIX}"
        return Path(str(self.name)).name if str(self.name).endswith(SUFFIX) else "tokenizer.json"

    def _write(self, draft: Path, sample: Callable[[], list[str]]) -> None:
        if self.trained_size is not None:
            train_bpe(iter(sample()), self.trained_size, draft)
        elif Path(str(self.name)).is_file():
            shutil.copyfile(str(self.name), draft)
        else:
            draft.write_text(encoding_file(str(self.name)), encoding="utf-8")
