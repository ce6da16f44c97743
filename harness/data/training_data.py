"""The data that a run trains on: a dataset, or several that are mixed by their weights and read as one."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from harness.common.errors import UserError
from harness.data.dataset import Dataset, TokenFile, check_token_ids


class JoinedTokens:
    """Tokens of several files, one after another, with the methods of a TokenFile that a data loader uses."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files = files
        self.ends = [*accumulate(map(len, files))]

    def __len__(self) -> int:
        return self.ends[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens from position `start` on, or fewer at the end of the file that contains `start`.
        `start` must be less than the total number of tokens."""
        index = bisect_right(self.ends, start)
        return self.files[index].read(start - (self.ends[index - 1] if index else 0), count)

    def read_ahead(self, starts: np.ndarray, count: int) -> None:
        indexes = np.searchsorted(self.ends, starts, side="right")
        for index in np.unique(indexes).tolist():
            begin = self.ends[index - 1] if index else 0
            self.files[index].read_ahead(starts[indexes == index] - begin, count)


@dataclass(frozen=True)
class TrainingData:
    """Datasets with their weights. All have the tokenizer of the first one."""

    parts: tuple[Dataset, ...]
    weights: tuple[float, ...]

    @classmethod
    def open(cls, datasets_dir: Path, weights: Mapping[str, float]) -> TrainingData:
        """Open the datasets that are the keys of `weights`. Raises UserError if one cannot be opened, or if their
        tokenizers differ."""
        parts = tuple(Dataset.open(datasets_dir, name) for name in weights)
        for other in parts[1:]:
            contents = [each.tokenizer for each in (parts[0], other)]
            if len({each.read_bytes() if isinstance(each, Path) else each for each in contents}) > 1:
                raise UserError(
                    f"{other.folder}: made with another tokenizer than {parts[0].name}, so the two cannot be mixed; "
                    f"prepare it again with --tokenizer {contents[0]}"
                )
        return cls(parts, tuple(weights.values()))

    @property
    def tokenizer(self) -> str | Path:
        """The tokenizer of all datasets, as `Dataset.tokenizer` returns it."""
        return self.parts[0].tokenizer

    @property
    def vocab_size(self) -> int | None:
        """The size of the tokenizer's vocabulary, or None if the first dataset's meta.json lacks it."""
        return self.parts[0].meta.vocab_size

    def lengths(self, split: str) -> list[int]:
        """Return each dataset's number of tokens in a split. Raises UserError if a file cannot be read."""
        return [len(part.split(split)) for part in self.parts]

    def tokens(self, split: str) -> TokenFile | JoinedTokens:
        files = [part.split(split) for part in self.parts]
        return files[0] if len(files) == 1 else JoinedTokens(files)

    def check_token_ids(self, splits: Iterable[str], vocab_size: int) -> None:
        """Raise UserError if a split cannot be read, or has a token id for which the model has no embedding."""
        for part in self.parts:
            for split in splits:
                check_token_ids(part, split, vocab_size)

    def record(self) -> dict[str, Any]:
        """Return the name and the fingerprint of the data, as checkpoints and the summary record them. For several
        datasets, "sources" has the weight and the fingerprint of each."""
        name, *others = (part.name for part in self.parts)
        if not others:
            return {"name": name, **self.parts[0].fingerprint()}
        sources = {
            part.name: {"weight": weight, **part.fingerprint()}
            for part, weight in zip(self.parts, self.weights, strict=True)
        }
        recorded: dict[str, Any] = {"name": " + ".join([name, *others]), "sources": sources}
        for split in ("train", "validation"):
            own = [(each["weight"], each[split]) for each in sources.values() if split in each]
            if len(own) == len(sources):
                digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()
                recorded[split] = {"tokens": sum(each["tokens"] for _, each in own), "sha256": digest}
        return recorded
