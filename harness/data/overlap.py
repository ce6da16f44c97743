"""Leave out documents that stand in a held-out split, so that no model is tested on text that it was trained on.

A document is left out if its normalised text is that of a held-out document, or if most of its windows of 13 tokens are
in the held-out split. Brown et al. ("Language Models are Few-Shot Learners", arXiv:2005.14165, appendix C) look for
common sequences of 13 words, since shorter ones are also common by chance.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from harness.common.errors import UserError
from harness.data.dataset import Dataset
from harness.data.order import hash64
from harness.data.preparation.encode import Encoded
from harness.data.tokenizers import Tokenizer, load_tokenizer

WINDOW = 13  # tokens
LEFT_OUT_SHARE = 0.5  # of a document's windows
MOST_WINDOWS = 2**24  # that are kept of the held-out text, 8 bytes each; of a longer text, one in several by its hash
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial that a window's tokens are the coefficients of
READ_TOKENS = 2**22
LOW_BITS = np.uint64(2**26 - 1)  # looking a hash up by them is much faster than a binary search


class HeldOutHashes:
    """Text of held-out splits, as hashes: of each document, and of windows of tokens."""

    def __init__(self, splits: Sequence[tuple[Dataset, str]], tokenizer: Tokenizer) -> None:
        """Read the splits. Their windows are in tokens of `tokenizer`. Raises UserError if a split cannot be read."""
        self.one_in = np.uint64(1 + sum(len(dataset.split(split)) for dataset, split in splits) // MOST_WINDOWS)
        self.texts: set[bytes] = set()
        windows = [np.empty(0, np.uint64)]
        for dataset, split in splits:
            theirs = load_tokenizer(dataset.tokenizer)
            is_same = theirs.has_tokens_of(tokenizer)
            for tokens in documents_of(dataset, split, theirs.eot_token):
                text = theirs.decode(tokens.tolist())
                self.texts.add(digest(text))
                own = tokens if is_same else tokenizer.encode_to_numpy(text)
                windows.append(self._chosen(window_hashes(own)))
        self.windows = np.unique(np.concatenate(windows))
        self.low_bits = np.zeros(int(LOW_BITS) + 1, bool)  # by the low bits of a hash: may it be in `windows`?
        self.low_bits[self.windows & LOW_BITS] = True

    def _chosen(self, hashes: np.ndarray) -> np.ndarray:
        return hashes[hashes % self.one_in == 0]

    def without(self, batches: Iterable[Encoded]) -> Iterator[Encoded]:
        """Yield the batches without the documents that stand in the held-out text. A document that goes on in a later
        batch is judged by its beginning, about a million characters."""
        is_left_out: bool | None = None  # of the document that the batch before has begun
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
        """Return for each document of a batch whether it stands in the held-out text: (documents,) bool."""
        count = int(numbers[-1]) + 1
        texts: list[list[str]] = [[] for _ in range(count)]
        for piece, number in zip(encoded.batch.pieces, numbers.tolist(), strict=True):
            texts[number].append(piece.text)
        is_known = np.array([digest("".join(text)) in self.texts for text in texts])
        hashes = window_hashes(encoded.tokens)
        documents = np.repeat(numbers, encoded.sizes[:, 0])
        owners = documents[: len(hashes)]
        is_chosen = (owners == documents[WINDOW - 1 :]) & (hashes % self.one_in == 0)
        hashes, owners = hashes[is_chosen], owners[is_chosen]
        may_be_there = np.flatnonzero(self.low_bits[hashes & LOW_BITS])
        found = np.searchsorted(self.windows, hashes[may_be_there])
        found[found == len(self.windows)] = 0
        is_there = self.windows[found] == hashes[may_be_there]
        there, of = (np.bincount(each, minlength=count) for each in (owners[may_be_there[is_there]], owners))
        known: np.ndarray = is_known | (there > LEFT_OUT_SHARE * of)
        return known


def digest(text: str) -> bytes:
    """Return a hash of a text's words, in lower case and without punctuation."""
    return hashlib.blake2b(" ".join(re.findall(r"\w+", text.lower())).encode(), digest_size=16).digest()


def window_hashes(tokens: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each window of WINDOW consecutive tokens: (tokens - WINDOW + 1,) uint64, or none."""
    count = max(0, len(tokens) - WINDOW + 1)
    hashes = np.zeros(count, np.uint64)
    for at in range(WINDOW):
        hashes = hashes * FACTOR + tokens[at : at + count].astype(np.uint64) + np.uint64(1)
    return hash64(hashes)


def documents_of(dataset: Dataset, split: str, eot_token: int) -> Iterator[np.ndarray]:
    """Yield the tokens of each document of a split, without the end-of-text token."""
    file, rest = dataset.split(split), np.empty(0, np.uint32)
    for at in range(0, len(file), READ_TOKENS):
        tokens = np.concatenate([rest, file.read(at, READ_TOKENS).astype(np.uint32)])
        *documents, rest = np.split(tokens, np.flatnonzero(tokens == eot_token) + 1)
        yield from (document[:-1] for document in documents)
    if len(rest):
        yield rest


class HeldOutSplits:
    """Splits of datasets whose documents prepare_datasets.py leaves out. `described` has their names and fingerprints,
    as meta.json records them."""

    def __init__(self, names: Sequence[str], datasets_dir: Path) -> None:
        """Open the splits that `names` has as DATASET:SPLIT; DATASET is a folder, or the name of a dataset in
        `datasets_dir`. Raises UserError if there is none."""
        self.splits: list[tuple[Dataset, str]] = []
        self.described: list[list[str]] = []
        for name in names:
            place, separator, split = name.rpartition(":")
            if not separator or not place:
                raise UserError(f"--exclude {name}: must be DATASET:SPLIT, such as me/books:test")
            dataset = Dataset.at(Path(place)) if Path(place).is_dir() else Dataset.open(datasets_dir, place)
            self.splits.append((dataset, split))
            self.described.append([name, dataset.split(split).fingerprint()])

    def left_out_of(self, batches: Iterable[Encoded], tokenizer: Tokenizer) -> Iterator[Encoded]:
        """Yield the batches, encoded by `tokenizer`, without the documents that stand in the splits."""
        yield from HeldOutHashes(self.splits, tokenizer).without(batches)
