"""Global batches that grow: BatchSchedule against counting step by step, and what ranks then read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from harness.common.errors import UserError
from harness.data.dataset import TokenFile
from harness.data.loader import BatchLayout, BatchSchedule, TokenLoader

LAYOUT = BatchLayout(world_size=2, accumulation_steps=1, microbatch_size=1, context_length=3)
RAMPS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 4)), max_size=4)


def layouts(ramp: list[tuple[int, int]]) -> list[tuple[int, BatchLayout]]:
    """Return the stages of a ramp from its gaps between stages and its added accumulation steps."""
    seen, steps, found = 0, 1, [(0, LAYOUT)]
    for gap, more in ramp:
        seen, steps = seen + gap, steps + more
        found.append((seen, replace(LAYOUT, accumulation_steps=steps)))
    return found


def counted(ramp: list[tuple[int, BatchLayout]], tokens_seen: int, steps: int) -> list[tuple[int, BatchLayout]]:
    """(tokens before, batch) of each step, one after the other."""
    before, found = 0, []
    for _ in range(steps):
        layout = [each for start, each in ramp if start <= tokens_seen + before][-1]
        found.append((before, layout))
        before += layout.global_tokens
    return found


@given(ramp=RAMPS.map(layouts), tokens_seen=st.integers(0, 200))
def test_as_counted_step_by_step(ramp: list[tuple[int, BatchLayout]], tokens_seen: int) -> None:
    schedule = BatchSchedule.ramp(ramp, tokens_seen)
    steps = counted(ramp, tokens_seen, 60)
    assert [(schedule.tokens_before(step), schedule.at(step)) for step in range(60)] == steps
    starts = [before for before, _ in steps]
    for tokens in range(starts[40]):
        assert schedule.steps_within(tokens) == sum(start <= tokens for start in starts) - 1
        assert schedule.steps_for(tokens) == sum(start < tokens for start in starts)


@given(ramp=RAMPS.map(layouts), first=st.integers(0, 30))
def test_what_is_left_after_any_step_is_the_same(ramp: list[tuple[int, BatchLayout]], first: int) -> None:
    """A run that continues there has the batches of one that never stopped."""
    whole = BatchSchedule.ramp(ramp, 0)
    seen = whole.tokens_before(first)
    rest = BatchSchedule.ramp(ramp, seen)
    for step in range(20):
        assert rest.at(step) == whole.at(first + step)
        assert seen + rest.tokens_before(step) == whole.tokens_before(first + step)


@given(ramp=RAMPS.map(layouts), wanted=st.integers(1, 300), available=st.integers(0, 400))
def test_the_number_of_steps(ramp: list[tuple[int, BatchLayout]], wanted: int, available: int) -> None:
    schedule = BatchSchedule.ramp(ramp, 0)
    steps = next(step for step in range(100) if schedule.tokens_before(step) >= wanted)
    if available > schedule.tokens_before(steps):
        assert schedule.num_steps(wanted, available) == steps
    else:
        with pytest.raises(UserError, match=f"wanted {schedule.tokens_before(steps) + 1:,} tokens, but there are"):
            schedule.num_steps(wanted, available)
    if available > LAYOUT.global_tokens:
        every = schedule.num_steps(-1, available)
        assert schedule.tokens_before(every) + 1 <= available <= schedule.tokens_before(every + 1)


def test_a_ramp_reads_every_token_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "counting.safetensors"
    save_file({"tokens": np.arange(1000, dtype=np.uint16)}, path)
    ramp = layouts([(20, 1), (1, 1), (50, 2)])
    schedule = BatchSchedule.ramp(ramp, 0)
    loader = TokenLoader(TokenFile(path), 5, ramp[-1][1], schedule)
    read = []
    for step in range(12):
        ranks = [loader.microbatches(step, rank) for rank in range(2)]
        assert [len(each) for each in ranks] == [schedule.at(step).accumulation_steps] * 2
        for passes in zip(*ranks, strict=True):
            read += [int(token) for microbatch in passes for token in microbatch.tokens[:-1]]
    assert read == list(range(5, 5 + schedule.tokens_before(12)))
