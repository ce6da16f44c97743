"""Hashes of a text's 13-grams, its sequences of 13 consecutive tokens, which show what two texts have in common.

Brown et al. ("Language Models are Few-Shot Learners", arXiv:2005.14165, appendix C) use sequences of 13 words.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from tqdm import tqdm

from harness.common.json_files import Count
from harness.common.libraries import usable_cores
from harness.common.messages import counted
from harness.data.dataset import TokenFile
from harness.data.order import hash64

NGRAM = 13  # tokens; shorter sequences are often shared by chance
COPIED_SHARE = 0.5  # a document is a copy if more than this share of its 13-grams occurs in the other text
MOST_NGRAMS = 2**23  # about the most 13-grams that are looked for: of a longer text, those with the smallest hashes
MOST_LOOKUP_BITS = 26
READ_TOKENS = 2**20
BLOCK_TOKENS = 2**16  # hashed at once; few enough to stay in the processor's cache


def _powers(factor: int) -> np.ndarray:
    powers = np.full(BLOCK_TOKENS + NGRAM, factor, np.uint64)
    powers[0] = 1
    return powers.cumprod()


FACTOR = 0x9E3779B97F4A7C15
POWERS, INVERSE_POWERS = _powers(FACTOR), _powers(pow(FACTOR, -1, 2**64))  # modulo 2**64


def ngram_hashes(tokens: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each 13-gram: (tokens - 12,) uint64, empty for fewer than 13 tokens. The method is Karp
    and Rabin's ("Efficient randomized pattern-matching algorithms", 1987)."""
    hashes = np.empty(max(0, len(tokens) - NGRAM + 1), np.uint64)
    for at in range(0, len(hashes), BLOCK_TOKENS):
        terms = tokens[at : at + BLOCK_TOKENS + NGRAM - 1].astype(np.uint64)
        terms += np.uint64(1)
        terms *= INVERSE_POWERS[: len(terms)]
        sums = terms.cumsum()
        # Values, modulo 2**64 and at 1 / FACTOR, of polynomials whose coefficients are the 13 token ids, each plus 1.
        # Each value is the difference of two prefix sums, multiplied by a power of FACTOR.
        polynomials = sums[NGRAM - 1 :].copy()
        polynomials[1:] -= sums[:-NGRAM]
        polynomials *= POWERS[: len(polynomials)]
        hashes[at : at + BLOCK_TOKENS] = hash64(polynomials)
    return hashes


def sampled_below(tokens: int) -> np.uint64:
    """Return a uint64 bound. About MOST_NGRAMS hashes of a text of `tokens` tokens are below it, or all if the text has
    at most MOST_NGRAMS tokens."""
    return np.uint64((2**64 - 1) * MOST_NGRAMS // max(tokens, MOST_NGRAMS))


class NgramIndex:
    """Sorted hashes of 13-grams, with a table that rules out most absent hashes without a search."""

    def __init__(self, hashes: np.ndarray) -> None:
        self.hashes = np.unique(hashes)
        bits = min(MOST_LOOKUP_BITS, len(self.hashes).bit_length() + 5)
        self._low_bits = np.uint64(2**bits - 1)
        self._may_be_here = np.zeros(2**bits, bool)  # by the low bits of a hash
        self._may_be_here[self.hashes & self._low_bits] = True

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of `hashes` are in this index, as indices into `hashes`, and their positions in `self.hashes`:
        two arrays of (found,) int64."""
        low_bits = (hashes & self._low_bits).view(np.int64)  # `take` is several times as fast as with uint64
        likely = np.flatnonzero(self._may_be_here.take(low_bits))
        places = np.searchsorted(self.hashes, hashes[likely])
        places[places == len(self.hashes)] = 0
        is_here = self.hashes[places] == hashes[likely]
        return likely[is_here], places[is_here]


def documents_of(file: TokenFile, eot_token: int) -> Iterator[np.ndarray]:
    """Yield the tokens of each document of a split, (tokens,) uint32, without the end-of-text token. Tokens after the
    last end-of-text token are a document, too."""
    rest = np.empty(0, np.uint32)
    for at in range(0, len(file), READ_TOKENS):
        tokens = np.concatenate([rest, file.read(at, READ_TOKENS).astype(np.uint32)])
        *documents, rest = np.split(tokens, np.flatnonzero(tokens == eot_token) + 1)
        yield from (document[:-1] for document in documents)
    if len(rest):
        yield rest


class Overlap(BaseModel):
    """Numbers of compared documents and 13-grams of a held-out split, and of those that are copied. A copied 13-gram
    occurs in the training text, and a copied document has more than half of its compared 13-grams there."""

    model_config = ConfigDict(frozen=True)

    documents: Count = Field(ge=0)
    copied_documents: Count = Field(ge=0)
    ngrams: Count = Field(ge=0)
    copied_ngrams: Count = Field(ge=0)

    @property
    def share(self) -> float:
        """Share of the compared 13-grams that occur in the training text; NaN if none were compared."""
        return self.copied_ngrams / self.ngrams if self.ngrams else math.nan

    def __str__(self) -> str:
        documents = counted(self.documents, "document")
        return f"{self.copied_documents:,} of {documents}, {self.share:.1%} of the 13-grams"


def find_overlap(held_out: TokenFile, training: Sequence[TokenFile], eot_token: int) -> Overlap:
    """Return how much of a held-out split occurs in the training text. Reads the whole training text. All files must
    have the same tokenizer. Of a long split, a sample of about MOST_NGRAMS 13-grams is compared. Documents without a
    compared 13-gram are not counted."""
    below = sampled_below(len(held_out))
    every, owners = _ngrams_by_document(held_out, eot_token, below)
    index = NgramIndex(every)
    is_copied = np.zeros(len(index.hashes), bool)

    def read(part: tuple[TokenFile, int]) -> None:
        file, start = part
        hashes = ngram_hashes(file.read(start, READ_TOKENS + NGRAM - 1))
        is_copied[index.find(hashes[hashes < below])[1]] = True

    parts = [(file, start) for file in training for start in range(0, len(file), READ_TOKENS)]
    is_quiet = not sys.stderr.isatty() or len(parts) < 100
    with ThreadPoolExecutor(usable_cores()) as threads:
        done = threads.map(read, parts)
        for _ in tqdm(done, "comparing with the training text", total=len(parts), disable=is_quiet):
            pass
    copied = is_copied[np.searchsorted(index.hashes, every)]
    of = np.bincount(owners)
    there = np.bincount(owners[copied], minlength=len(of))
    return Overlap(
        documents=int((of > 0).sum()),
        copied_documents=int((there > COPIED_SHARE * of).sum()),
        ngrams=len(every),
        copied_ngrams=int(copied.sum()),
    )


def document_ngrams(tokens: np.ndarray, eot_token: int, below: np.uint64) -> tuple[np.ndarray, np.ndarray]:
    """Hash the 13-grams that lie within one document. Return the hashes less than `below`, (hashes,) uint64, and the
    number of each hash's document, (hashes,) int32. The first token is of document 0."""
    hashes, is_end = ngram_hashes(tokens), tokens == eot_token
    numbers = is_end.cumsum(dtype=np.int32)  # per token: documents that end with it or before it
    firsts, lasts = numbers[: len(hashes)], numbers[NGRAM - 1 :]
    is_chosen = (firsts == lasts) & ~is_end[: len(hashes)] & (hashes < below)
    return hashes[is_chosen], firsts[is_chosen]


def _ngrams_by_document(file: TokenFile, eot_token: int, below: np.uint64) -> tuple[np.ndarray, np.ndarray]:
    """Return what `document_ngrams` returns for all tokens of a split."""
    ended = 0
    hashes, owners = [np.empty(0, np.uint64)], [np.empty(0, np.int32)]
    for start in range(0, len(file), READ_TOKENS):
        tokens = file.read(start, READ_TOKENS + NGRAM - 1)
        own, documents = document_ngrams(tokens, eot_token, below)
        hashes.append(own)
        owners.append(ended + documents)
        ended += int((tokens[:READ_TOKENS] == eot_token).sum())
    return np.concatenate(hashes), np.concatenate(owners)
