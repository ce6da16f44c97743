"""Options of prepare_datasets.py, and those of them that are recorded on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.data.preparation.documents import TextFormat

# A value as a work folder's journal.json and a dataset's meta.json have it.
Recorded = str | int | float | list[str] | None


@dataclass(frozen=True)
class PreparationOptions:
    """The command's options that decide how a dataset is made, by the command's names and with its defaults."""

    text_column: str = "text"
    document_separator: str | None = None  # as it was typed
    replace_invalid: bool = False
    include: tuple[str, ...] = ()
    revision: str | None = None
    delete_after: bool = False
    tokenizer: str | None = None
    train_tokenizer: int | None = None
    validation_fraction: float = 0.01
    test_fraction: float = 0.0
    split_order: Literal["seeded", "given"] = "seeded"
    shuffle_seed: int | None = None
    description: str = ""
    workers: int | None = None
    overwrite: bool = False
    restart: bool = False
    from_bin: bool = False
    token_dtype: str | None = None

    @property
    def text_format(self) -> TextFormat:
        """Format of the documents in the files."""
        separator = self.document_separator
        errors: Literal["strict", "replace"] = "replace" if self.replace_invalid else "strict"
        return TextFormat(self.text_column, separator and _unescaped(separator), errors)

    def deciding(self) -> dict[str, Recorded]:
        """The options that decide the bytes of a dataset made of text, to be recorded: interrupted work resumes with
        the same ones only."""
        return {
            "text_column": self.text_column,
            "document_separator": self.document_separator,
            "replace_invalid": "any" if self.replace_invalid else False,
            "include": list(self.include),
            "tokenizer": self.tokenizer,
            "train_tokenizer": self.train_tokenizer,
            "validation_fraction": self.validation_fraction,
            "test_fraction": self.test_fraction,
            # The given order was the only one once, and had no key.
            **({} if self.split_order == "given" else {"split_order": self.split_order}),
            "shuffle_seed": self.shuffle_seed,
        }

    def deciding_for_shards(self) -> dict[str, Recorded]:
        """The options that decide the bytes of a dataset made of token shards."""
        return {"from_bin": True, "token_dtype": self.token_dtype, "tokenizer": self.tokenizer}


def _unescaped(text: str) -> str:
    r"""Replace \n, \r, \t and \\ by what they stand for, since few shells let one type them."""
    return text.replace("\\\\", "\0").replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t").replace("\0", "\\")
