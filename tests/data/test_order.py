"""The order in which the windows of a split are read."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from harness.data.order import PERIOD, WindowOrder, interleave, permute

WORD = 2**64


def hashed(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB % WORD
    return value ^ value >> 31


def image(number: int, size: int, seed: tuple[int, int]) -> int:
    """The image of one number, by Python's integers and with the halves swapped after each round, as in textbooks."""
    bits = max(2, (size - 1).bit_length())
    widths = [bits // 2, bits - bits // 2]  # of the half that is kept and of the one that is changed; they alternate
    kept, changed = number >> widths[1], number % 2 ** widths[1]
    for key in np.random.SeedSequence(seed).generate_state(8, np.uint64).tolist():
        kept, changed = changed ^ hashed((kept + key) % WORD) >> 64 - widths[1], kept
        widths.reverse()
    joined = kept << widths[1] | changed
    return joined if joined < size else image(joined, size, seed)


@given(size=st.integers(1, 3000), seed=st.tuples(st.integers(0, 2**62), st.integers(0, 2**20)))
def test_a_permutation_for_every_size_and_seed(size: int, seed: tuple[int, int]) -> None:
    images = permute(np.arange(size), size, seed)
    assert sorted(images.tolist()) == list(range(size))
    number = seed[1] % size
    assert images[number] == image(number, size, seed)
    assert permute(np.array([number]), size, seed)[0] == images[number]


def test_the_same_in_every_version() -> None:
    """A run that an earlier version began must read the same windows."""
    assert permute(np.arange(10), 10, (42, 0)).tolist() == [5, 7, 1, 2, 3, 8, 4, 0, 9, 6]
    assert permute(np.arange(5), 10**10, (1, 7)).tolist() == [
        9399062509,
        6544990782,
        1897300970,
        6121793704,
        3686504821,
    ]


@pytest.mark.parametrize(
    "size", [3, pytest.param(10, marks=pytest.mark.slow), pytest.param(37, marks=pytest.mark.slow)]
)
def test_every_place_is_equally_likely_in_a_pass(size: int) -> None:
    passes = 4000
    orders = np.array([permute(np.arange(size), size, (5, each)) for each in range(passes)])
    for window in (0, size // 2, size - 1):
        assert scipy.stats.chisquare(np.bincount(orders[:, window], minlength=size)).pvalue > 1e-4
    steps = np.diff(orders, axis=1) % size  # from window to window; 0 cannot be
    assert scipy.stats.chisquare(np.bincount(steps.ravel(), minlength=size)[1:]).pvalue > 1e-4


def test_neighbors_are_as_far_apart_as_in_a_random_order() -> None:
    size = 100_000
    order = permute(np.arange(size), size, (0, 0))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / size**0.5
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 5 / size**0.5
    assert abs(np.abs(np.diff(order)).mean() - size / 3) < 5 * size / 3 / size**0.5


def test_time_and_memory_do_not_grow_with_the_data() -> None:
    order = WindowOrder([10**13], 1024, seed=3)
    tracemalloc.start()
    began = time.process_time()
    assert order.starts(10**9, 64).max() < 10**13
    assert time.process_time() - began < 0.1
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@given(
    windows=st.integers(1, 40),
    first_token=st.integers(0, 5),
    seed=st.none() | st.integers(0, 99),
    parts=st.lists(st.integers(1, 30), max_size=8),
)
def test_each_pass_reads_each_window_once(windows: int, first_token: int, seed: int | None, parts: list[int]) -> None:
    """The windows that one read after another gives are those of whole passes, however they are divided."""
    order = WindowOrder([first_token + windows * 4 + 3], 4, first_token=first_token, seed=seed)
    assert order.windows == [windows]
    starts: list[int] = []
    for count in parts:
        starts += order.starts(len(starts), count).tolist()
    every = [first_token + 4 * window for window in range(windows)]
    passes = [starts[at : at + windows] for at in range(0, len(starts), windows)]
    for each in passes[: len(starts) // windows]:
        assert sorted(each) == every
        assert seed is not None or each == every
    if seed is not None and windows > 20 and len(starts) >= 2 * windows:
        assert passes[0] != passes[1]


@given(weights=st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_turns_are_in_proportion_and_spread_out(weights: list[int]) -> None:
    """In the whole sequence each item has its share, and in each beginning of it the share to within one turn for each
    item."""
    turns = interleave(weights)
    shares = np.array(weights) / sum(weights)
    counts = np.bincount(turns, minlength=len(weights))
    assert np.abs(counts / len(turns) - shares).max() <= 1 / PERIOD * len(weights)
    seen = (turns[:, None] == np.arange(len(weights))).cumsum(0)
    expected = np.arange(1, len(turns) + 1)[:, None] * counts / len(turns)
    assert np.abs(seen - expected).max() < len(weights)


@given(
    splits=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=4),
    seed=st.none() | st.integers(0, 99),
    parts=st.lists(st.integers(1, 40), max_size=6),
)
def test_each_split_of_a_mixture_is_read_in_passes_of_its_own(
    splits: list[tuple[int, int]], seed: int | None, parts: list[int]
) -> None:
    lengths, weights = [windows * 4 + 2 for windows, _ in splits], [weight for _, weight in splits]
    order = WindowOrder(lengths, 4, seed=seed, weights=weights)
    starts: list[int] = []
    for count in parts:
        starts += order.starts(len(starts), count).tolist()
    firsts = np.cumsum([0, *lengths])
    of_splits = np.searchsorted(firsts, starts, side="right") - 1
    assert order.read(len(starts)).tolist() == np.bincount(of_splits, minlength=len(splits)).tolist()
    for split, (windows, _) in enumerate(splits):
        own = (np.array(starts)[of_splits == split] - firsts[split]).tolist()
        assert order.passes(len(starts))[split] == len(own) / windows
        for at in range(0, len(own) - windows + 1, windows):
            assert sorted(own[at : at + windows]) == [4 * each for each in range(windows)]
        assert seed is not None or own == [4 * (number % windows) for number in range(len(own))]
    for passes in (1.0, 1.5):
        most = order.available(passes)
        limits = [int(passes * windows) for windows, _ in splits]
        assert all(order.read(most) <= limits)
        assert any(order.read(most + 1) > limits)
