"""Leave out documents that occur in held-out splits (`--exclude` of prepare_datasets.py).

A document is left out if its normalized text is that of a held-out document, or if more than half of its 13-grams are
in the held-out splits. Long held-out splits are sampled, and very long documents are judged by their first part.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from harness.common.errors import UserError, explained
from harness.data.dataset import Dataset
from harness.data.ngrams import COPIED_SHARE, NgramIndex, document_ngrams, documents_of, ngram_hashes, sampled_below
from harness.data.preparation.encode import Encoded
from harness.data.tokenizers import Tokenizer, load_tokenizer


class HeldOutHashes:
    """Text of held-out splits, as hashes: of each document, and of 13-grams of tokens."""

    def __init__(self, splits: Sequence[tuple[Dataset, str]], tokenizer: Tokenizer) -> None:
        """Read the splits, and hash their documents and the 13-grams of their text as `tokenizer` encodes it."""
        self.eot_token = tokenizer.eot_token
        self.below = sampled_below(sum(len(dataset.split(split)) for dataset, split in splits))
        self.texts: set[bytes] = set()
        hashes = [np.empty(0, np.uint64)]
        for dataset, split in splits:
            theirs = load_tokenizer(dataset.tokenizer)
            is_same = theirs.has_tokens_of(tokenizer)
            for tokens in documents_of(dataset.split(split), theirs.eot_token):
                text = theirs.decode(tokens.tolist())
                self.texts.add(digest(text))
                own = tokens if is_same else tokenizer.encode_to_numpy(text)
                own_hashes = ngram_hashes(own)
                hashes.append(own_hashes[own_hashes < self.below])
        self.texts.discard(digest(""))  # otherwise, a held-out text without words would exclude all such texts
        self.ngrams = NgramIndex(np.concatenate(hashes))

    def without(self, batches: Iterable[Encoded]) -> Iterator[Encoded]:
        """Yield the batches without the documents that also occur in the held-out text. A document that extends over
        several batches is judged by its part in the first one."""
        is_left_out: bool | None = None  # for a document that continues from the batch before; None: there is none
        for encoded in batches:
            numbers = np.cumsum(encoded.ends) - encoded.ends  # number of each piece's document within the batch
            if not len(numbers):
                yield encoded
                continue
            left_out = self._judge(encoded, numbers)
            begun = int(left_out.sum())
            if is_left_out is not None:
                begun -= int(left_out[0])
                left_out[0] = is_left_out
            is_left_out = None if encoded.ends[-1] else bool(left_out[-1])
            keep = ~left_out[numbers]
            sizes = encoded.sizes
            tokens = encoded.tokens[np.repeat(keep, sizes[:, 0])]
            yield replace(encoded, tokens=tokens, sizes=sizes[keep], ends=encoded.ends[keep], left_out=begun)

    def _judge(self, encoded: Encoded, numbers: np.ndarray) -> np.ndarray:
        """Return (documents,) bool: True for each document of the batch that occurs in the held-out text."""
        count = int(numbers[-1]) + 1
        texts: list[list[str]] = [[] for _ in range(count)]
        for piece, number in zip(encoded.batch.pieces, numbers.tolist(), strict=True):
            texts[number].append(piece.text)
        is_known = np.array([digest("".join(text)) in self.texts for text in texts])
        hashes, owners = document_ngrams(encoded.tokens, self.eot_token, self.below)
        there, of = (np.bincount(each, minlength=count) for each in (owners[self.ngrams.find(hashes)[0]], owners))
        known: np.ndarray = is_known | (there > COPIED_SHARE * of)
        return known


def digest(text: str) -> bytes:
    """Return a 16-byte hash of a text's words, regardless of case and punctuation."""
    return hashlib.blake2b(" ".join(re.findall(r"\w+", text.lower())).encode(), digest_size=16).digest()


class HeldOutSplits:
    """Splits whose documents are left out by prepare_datasets.py (--exclude). `described` has the splits' names and
    fingerprints, as meta.json records them."""

    def __init__(self, names: Sequence[str], datasets_dir: Path) -> None:
        """Open the splits. Each of `names` is DATASET:SPLIT, where DATASET is a folder, or the name of a dataset in
        `datasets_dir`. Raises UserError if a name is wrong or a split cannot be opened."""
        self.splits: list[tuple[Dataset, str]] = []
        self.described: list[list[str]] = []
        for name in names:
            place, _, split = name.rpartition(":")
            if not place or split not in ("train", "validation", "test"):
                raise UserError(
                    f"--exclude {name}: must be DATASET:SPLIT with the split train, validation or test, such as "
                    "me/books:test"
                )
            with explained(f"--exclude {name}: "):
                dataset = Dataset.at(Path(place)) if Path(place).is_dir() else Dataset.open(datasets_dir, place)
                self.described.append([name, dataset.split(split).fingerprint()])
            self.splits.append((dataset, split))

    def without_held_out(self, batches: Iterable[Encoded], tokenizer: Tokenizer) -> Iterator[Encoded]:
        """Yield the batches, encoded by `tokenizer`, without the documents that occur in the splits."""
        yield from HeldOutHashes(self.splits, tokenizer).without(batches)
