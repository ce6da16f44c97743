"""Order in which the windows of one or more splits are read. A window is the T input tokens of a sequence.

The position of a window depends only on its number in the run and on the arguments of `WindowOrder`. So a run resumes
at any window, on any number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

ROUNDS = 8  # of the Feistel network; four make it a pseudo-random permutation (Luby and Rackoff, 1988)
PERIOD = 1000  # about the most windows in a mixture's repeating pattern; shares are rounded to multiples of 1 / PERIOD


class WindowOrder:
    """Order of the windows of one split, or of several that are mixed by their `weights`.

    - A pass over a split reads all its windows once: without a `seed` from front to back, with a `seed` in a new random
      order. Each split begins its next pass independently of the others.
    - A window's position is the index of its first token among the tokens of all splits, laid end to end.
    """

    def __init__(
        self,
        splits: Sequence[int],
        context_length: int,
        *,
        first_token: int = 0,
        seed: int | None = None,
        weights: Sequence[float] = (1.0,),
    ) -> None:
        """Define the order. `splits` has the number of tokens of each split. In each split, the tokens before position
        `first_token` are not read. A window is read only if it is whole and followed by a token, its last target."""
        self.context_length = context_length
        self.first_token = first_token
        self.seed = seed
        self.windows = [max(0, (tokens - first_token - 1) // context_length) for tokens in splits]  # of one pass
        self._firsts = [start + first_token for start in itertools.accumulate(splits[:-1], initial=0)]
        self._pattern = interleave(weights)  # the split of each window of a period
        self._counts = np.bincount(self._pattern, minlength=len(splits))  # of each split's windows in a period
        of_split = self._pattern == np.arange(len(splits))[:, None]  # (splits, period)
        # For each place in a period, the number of earlier windows of the same split in the period.
        self._before = np.take_along_axis(of_split.cumsum(1) - 1, self._pattern[None], 0)[0]

    @property
    def is_front_to_back(self) -> bool:
        return self.seed is None and len(self.windows) == 1

    def starts(self, first: int, count: int) -> np.ndarray:
        """Return the positions at which windows `first` .. `first + count - 1` of the run begin, as int64 of shape
        (count,). Windows are numbered from 0 through all passes. Each split must have at least one window."""
        if len(self.windows) == 1:
            return self._starts_in(0, np.arange(first, first + count))
        periods, places = np.divmod(np.arange(first, first + count), len(self._pattern))
        splits = self._pattern[places]
        numbers = periods * self._counts[splits] + self._before[places]  # of the window among those of its split
        starts = np.empty(count, np.int64)
        for split in np.unique(splits):
            starts[splits == split] = self._starts_in(int(split), numbers[splits == split])
        return starts

    def _starts_in(self, split: int, numbers: np.ndarray) -> np.ndarray:
        passes, places = np.divmod(numbers, self.windows[split])
        if self.seed is not None:
            for each in np.unique(passes):
                seed = (self.seed, int(each), split) if split else (self.seed, int(each))
                places[passes == each] = permute(places[passes == each], self.windows[split], seed)
        return self._firsts[split] + places * self.context_length

    def read(self, windows: int) -> np.ndarray:
        """Return how many of the run's first `windows` windows are from each split: (splits,) int64."""
        periods, rest = divmod(windows, len(self._pattern))
        return periods * self._counts + np.bincount(self._pattern[:rest], minlength=len(self.windows))

    def passes(self, windows: int) -> np.ndarray:
        """Return how many passes over each split the run's first `windows` windows make: (splits,) float64."""
        return self.read(windows) / self.windows

    def available(self, passes: float) -> int:
        """Return the largest number of windows for which no split is read more than `passes` times."""
        available = []
        for split, (windows, count) in enumerate(zip(self.windows, self._counts.tolist(), strict=True)):
            periods, rest = divmod(int(passes * windows), count)
            available.append(periods * len(self._pattern) + int(np.flatnonzero(self._pattern == split)[rest]))
        return min(available)


def interleave(weights: Sequence[float]) -> np.ndarray:
    """Return the repeating pattern in which items with these weights take turns: their indices, (turns,) int64.

    Each item has about its share of the turns, and at least one. The method is smooth weighted round-robin, as in
    nginx.
    """
    shares = np.asarray(weights) / sum(weights) * PERIOD
    counts = np.maximum(1, np.floor(shares).astype(int))
    for index in np.argsort(counts - shares, kind="stable")[: max(0, PERIOD - counts.sum())]:
        counts[index] += 1
    counts //= np.gcd.reduce(counts)
    credit, turns = np.zeros(len(counts), int), []
    for _ in range(counts.sum()):
        credit += counts
        turns.append(int(credit.argmax()))
        credit[turns[-1]] -= counts.sum()
    return np.array(turns)


def permute(numbers: np.ndarray, size: int, seed: Sequence[int]) -> np.ndarray:
    """Return the images, (numbers,) int64, of `numbers` under a random permutation of range(size) that `seed`
    determines.

    Each number must be less than `size`. Time and memory do not grow with `size`. The method is the cycle-walking
    cipher of Black and Rogaway ("Ciphers with arbitrary finite domains", CT-RSA 2002).
    """
    bits = max(2, (size - 1).bit_length())
    keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)
    images, is_outside = numbers.astype(np.uint64), np.ones(len(numbers), bool)
    # An image that is not below `size` is permuted again until it is.
    while is_outside.any():
        images[is_outside] = _feistel(images[is_outside], bits, keys)
        is_outside = images >= size
    return images.astype(np.int64)


def _feistel(numbers: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Permute numbers of `bits` bits by a Feistel network with one round for each key."""
    low_bits, high_bits = np.uint64(bits - bits // 2), np.uint64(bits // 2)
    high, low = numbers >> low_bits, numbers & ((np.uint64(1) << low_bits) - np.uint64(1))
    for index, key in enumerate(keys):
        if index % 2:
            high = high ^ (hash64(low + key) >> (np.uint64(64) - high_bits))
        else:
            low = low ^ (hash64(high + key) >> (np.uint64(64) - low_bits))
    return (high << low_bits) | low


def hash64(values: np.ndarray) -> np.ndarray:
    """Return 64-bit hashes of uint64 values: the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014, figure 17)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
