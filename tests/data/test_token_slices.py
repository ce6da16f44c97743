"""Tokens that a rank trains on: the exact arithmetic of slices, and how dataset folders are opened and checked."""

from __future__ import annotations

import json
import struct
import time
from bisect import bisect_left, bisect_right
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from harness.common.errors import UserError
from harness.data.dataset import Dataset, TokenFile, check_token_ids
from harness.data.loader import BatchLayout, BatchSchedule, TokenLoader
from harness.data.order import WindowOrder
from tests.support.launch import Workshop

# Global batches that grow: BatchSchedule is checked against counting step by step. With an empty ramp, batches are
# constant.


LAYOUT = BatchLayout(world_size=2, accumulation_steps=1, microbatch_size=1, context_length=3)
RAMPS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 4)), max_size=4)


def layouts(ramp: list[tuple[int, int]], first: BatchLayout = LAYOUT) -> list[tuple[int, BatchLayout]]:
    """Return (first token, layout) of each stage. For each further stage `ramp` gives how many tokens later it begins
    and how many accumulation steps it adds."""
    seen, found = 0, [(0, first)]
    for gap, more in ramp:
        seen += gap
        found.append((seen, replace(first, accumulation_steps=found[-1][1].accumulation_steps + more)))
    return found


def counted(ramp: list[tuple[int, BatchLayout]], tokens_seen: int, steps: int) -> list[tuple[int, BatchLayout]]:
    """Return (tokens before the step, layout) for each step, by counting."""
    before, found = 0, []
    for _ in range(steps):
        layout = [each for start, each in ramp if start <= tokens_seen + before][-1]
        found.append((before, layout))
        before += layout.global_tokens
    return found


@given(ramp=RAMPS.map(layouts), tokens_seen=st.integers(0, 200))
def test_a_schedule_is_as_counted_step_by_step(ramp: list[tuple[int, BatchLayout]], tokens_seen: int) -> None:
    schedule = BatchSchedule.ramp(ramp, tokens_seen)
    steps = counted(ramp, tokens_seen, 60)
    assert [(schedule.tokens_before(step), schedule.at(step)) for step in range(60)] == steps
    starts = [before for before, _ in steps]
    for tokens in range(starts[40]):
        assert schedule.steps_within(tokens) == bisect_right(starts, tokens) - 1
        assert schedule.steps_for(tokens) == bisect_left(starts, tokens)


@given(ramp=RAMPS.map(layouts), first=st.integers(0, 30))
def test_what_is_left_after_any_step_is_the_same(ramp: list[tuple[int, BatchLayout]], first: int) -> None:
    """A run that resumes after any step has the same batches as a run that never stopped."""
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


@pytest.mark.slow
@given(
    first=st.builds(BatchLayout, *(st.integers(1, most) for most in (4, 3, 3, 5))),
    ramp=RAMPS,
    windows=st.integers(1, 30) | st.integers(1000, 3000),
    start=st.integers(0, 7),
    seed=st.none() | st.integers(0, 9),
    seen=st.integers(0, 50),
)
def test_windows_are_read_in_their_order_by_all_ranks_together(
    tmp_path_factory: pytest.TempPathFactory,
    first: BatchLayout,
    ramp: list[tuple[int, int]],
    windows: int,
    start: int,
    seed: int | None,
    seen: int,
) -> None:
    """The windows of all steps, accumulation steps and ranks together are those of the order, from any window on and
    through several passes. Without a shuffle, they follow one another. Targets begin one token later."""
    path = tmp_path_factory.getbasetemp() / "counting.safetensors"
    if not path.exists():
        save_file({"tokens": np.arange(2**14, dtype=np.uint16)}, path)
    stages, length = layouts(ramp, first), first.context_length
    schedule = BatchSchedule.ramp(stages, 0)
    order = WindowOrder([start + windows * length + 1], length, first_token=start, seed=seed)
    loader = TokenLoader(TokenFile(path), order, stages[-1][1], schedule, first_window=seen)
    read, steps = [], 4
    for step in range(steps):
        of_ranks = [loader.microbatches(step, rank) for rank in range(first.world_size)]
        assert [len(each) for each in of_ranks] == [schedule.at(step).accumulation_steps] * first.world_size
        for pass_of_all in zip(*of_ranks, strict=True):  # microbatch (step * A + a) * world_size + rank
            for microbatch in pass_of_all:
                x_BxT, y_BxT = microbatch.to(torch.device("cpu"))
                assert x_BxT.shape == (first.microbatch_size, length)
                assert torch.equal(x_BxT, x_BxT[:, :1] + torch.arange(length))
                assert torch.equal(y_BxT, x_BxT + 1)
                read += x_BxT[:, 0].tolist()
    assert read == order.starts(seen, len(read)).tolist()
    assert seed is not None or read == [start + length * (seen + at) % (windows * length) for at in range(len(read))]
    assert len(read) * length == schedule.tokens_before(steps)


def test_the_last_microbatch_of_an_evaluation_is_filled_up(tmp_path: Path) -> None:
    save_file({"tokens": np.arange(100, dtype=np.uint16)}, tmp_path / "test.safetensors")
    loader = TokenLoader(TokenFile(tmp_path / "test.safetensors"), WindowOrder([100], 5), BatchLayout(1, 1, 4, 5))
    assert loader.microbatch(0, windows=6).counted is None
    last = loader.microbatch(1, windows=6)
    assert last.counted == 2
    assert last.windows[:, 0].tolist() == [20, 25, 25, 25]
    assert loader.microbatch(1, windows=8).counted is None


# Dataset folders ------------------------------------------------------------------------------------------


def test_twenty_gibibytes_open_at_once_and_take_no_memory(tmp_path: Path) -> None:
    count = 10 * 2**30
    header = json.dumps({"tokens": {"dtype": "U16", "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "train.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * count)  # a sparse file, which takes no disk space
    before, began = _writable_memory(), time.perf_counter()
    tokens = TokenFile(path)
    last = tokens.read(count - 5, 5)
    assert time.perf_counter() - began < 1
    assert _writable_memory() - before < 2**26
    assert len(tokens) == count
    assert last.tolist() == [0] * 5


def _writable_memory() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def test_the_vocabulary_scan_is_exact_and_remembered(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    folder = shop.add_dataset(largest=40)
    before = sorted(folder.iterdir())
    dataset = Dataset.open(shop.datasets, "local/letters")
    largest = dataset.split("train").largest_token()
    assert largest == 40
    check_token_ids(dataset, "train", 41)
    with pytest.raises(UserError, match=r"train.safetensors: token id 40 is beyond the model's vocabulary of 40"):
        check_token_ids(dataset, "train", 40)
    facts = folder / "meta.json"
    written = facts.read_text()
    facts.write_text(json.dumps(json.loads(written) | {"vocab_size": 40, "eot_token": 0}))
    with pytest.raises(UserError, match=r"token id 40 is beyond the model's .*perhaps the file is damaged"):
        check_token_ids(Dataset.open(shop.datasets, "local/letters"), "train", 40)
    facts.write_text(written)
    assert sorted(folder.iterdir()) == before  # a user's folder is not written to
    memory = next((shop.datasets / ".scans").glob("*--train.json"))
    # The remembered result is used until the file changes.
    memory.write_text(memory.read_text().replace('"largest_token": 40', '"largest_token": 99'))
    with pytest.raises(UserError, match="token id 99"):
        check_token_ids(dataset, "train", 41)
    save_file({"tokens": np.array([1, 2, 3], dtype=np.uint16)}, folder / "train.safetensors")
    check_token_ids(Dataset.open(shop.datasets, "local/letters"), "train", 4)


def test_the_fingerprint_sees_another_dataset(tmp_path: Path) -> None:
    prints = []
    for number, change in enumerate((None, 0, 60_000, 119_999)):
        tokens = np.arange(120_000, dtype=np.uint32) % 500
        if change is not None:
            tokens[change : change + 5000] += 1
        path = tmp_path / f"{number}.safetensors"
        save_file({"tokens": tokens}, path)
        prints.append(TokenFile(path).fingerprint())
    assert len(set(prints)) == 4
    save_file({"tokens": np.arange(120_000, dtype=np.uint32) % 500}, tmp_path / "again.safetensors")
    assert TokenFile(tmp_path / "again.safetensors").fingerprint() == prints[0]


def test_the_notebooks_meta_json_is_understood(tmp_path: Path) -> None:
    """`files` may be an object. If no tokenizer is named, it is GPT-2's. If no counts are given, the bytes per token
    are unknown."""
    shop = Workshop(tmp_path)
    folder = shop.add_dataset()
    files = {"train": "train.safetensors", "validation": "validation.safetensors"}
    (folder / "meta.json").write_text(json.dumps({"description": "x", "token_dtype": "uint16", "files": files}))
    dataset = Dataset.open(shop.datasets, "local/letters")
    assert dataset.tokenizer == "gpt2"
    assert dataset.bytes_per_token("test") is None
