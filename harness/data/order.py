"""Order in which a split's windows are read: front to back or shuffled, once or several times.

A window is the T tokens of a sequence. The order is a function of the window's number in the run alone, so that a run
resumes at any window, on any number of ranks, and no list of windows is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUNDS = 8  # of the Feistel network; four make it a pseudo-random permutation (Luby and Rackoff, 1988)


@dataclass(frozen=True)
class WindowOrder:
    """Order of the windows of a split. A pass reads each of the split's `windows` windows once. With a `seed`, each
    pass reads them in another random order, which the seed determines; without, from front to back."""

    windows: int  # number of whole windows from `first_token` on
    context_length: int
    first_token: int = 0  # position in the split
    seed: int | None = None

    @classmethod
    def of_split(
        cls, split_tokens: int, context_length: int, *, first_token: int = 0, seed: int | None = None
    ) -> WindowOrder:
        """Return the order for a split of `split_tokens` tokens, of which those before `first_token` are not read. The
        last window's last target is one token more."""
        return cls(max(0, (split_tokens - first_token - 1) // context_length), context_length, first_token, seed)

    def starts(self, first: int, count: int) -> np.ndarray:
        """Return the positions in the split at which windows `first` .. `first + count - 1` of the run begin, as int64
        of shape (count,). Windows are numbered from 0 through all passes."""
        passes, places = np.divmod(np.arange(first, first + count), self.windows)
        if self.seed is not None:
            for each in np.unique(passes):
                is_in_pass = passes == each
                places[is_in_pass] = permute(places[is_in_pass], self.windows, (self.seed, int(each)))
        return self.first_token + places * self.context_length


def permute(numbers: np.ndarray, size: int, seed: Sequence[int]) -> np.ndarray:
    """Return the images of `numbers`, all of them below `size`, under a random permutation of range(size), as int64.
    `seed` determines the permutation. Time and memory do not depend on `size`.

    It is a Feistel network on the numbers of as many bits as `size` needs. An image that is not below `size` is
    permuted again until it is (the cycle-walking cipher of Black and Rogaway, "Ciphers with arbitrary finite domains",
    CT-RSA 2002). At most half of these numbers are not below `size`, so that two networks suffice on average.
    """
    bits = max(2, (size - 1).bit_length())
    keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)
    images, is_outside = numbers.astype(np.uint64), np.ones(len(numbers), bool)
    while is_outside.any():
        images[is_outside] = _feistel(images[is_outside], bits, keys)
        is_outside = images >= size
    return images.astype(np.int64)


def _feistel(numbers: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Permute numbers of `bits` bits, which are split into two halves (of an odd number, the lower one is larger). Each
    key changes one half by a hash of the other one."""
    low_bits, high_bits = np.uint64(bits - bits // 2), np.uint64(bits // 2)
    high, low = numbers >> low_bits, numbers & ((np.uint64(1) << low_bits) - np.uint64(1))
    for index, key in enumerate(keys):
        if index % 2:
            high = high ^ (_hash(low + key) >> (np.uint64(64) - high_bits))
        else:
            low = low ^ (_hash(high + key) >> (np.uint64(64) - low_bits))
    return (high << low_bits) | low


def _hash(values: np.ndarray) -> np.ndarray:
    """Return 64-bit hashes of uint64 values: the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014, figure 17)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
