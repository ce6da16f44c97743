"""Tokens that a rank sees: the arithmetic of slices, exactly, and dataset folders as they are found."""

from __future__ import annotations

import json
import struct
import time
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
from harness.planning.experiment import find_position
from harness.runs.train_config import load_train_config
from tests.support.isolation import SHIPPED_RUNS
from tests.support.launch import Workshop

FINEWEB_TOKENS = 10_248_871_837  # the notebook's train split

# Tokens and global steps of the four rented machines, from the notebook.
NOTEBOOK = {
    "8xa100m40": (3_260_268_544, 30_614),
    "8xa100m80": (3_260_350_464, 14_214),
    "8xh100m80": (3_260_252_160, 14_740),
    "8xb200m160": (3_260_547_072, 6_219),
}


@pytest.mark.parametrize("name", NOTEBOOK)
def test_the_notebooks_token_counts(name: str) -> None:
    config = load_train_config(SHIPPED_RUNS / name / "train.json")
    layout = BatchLayout(8, config.accumulation_steps(8), config.microbatch_size, 1024)
    position = find_position(config, layout, FINEWEB_TOKENS)
    assert (position.total_steps * layout.global_tokens, position.total_steps) == NOTEBOOK[name]


@given(wanted=st.integers(1, 10**6), extra=st.integers(0, 10**5), batch=st.integers(1, 10**5))
def test_the_smallest_whole_number_of_batches(wanted: int, extra: int, batch: int) -> None:
    batches = -(-wanted // batch)
    schedule = BatchSchedule.constant(BatchLayout(1, 1, 1, batch))
    assert schedule.num_steps(wanted, batches * batch + 1 + extra) == batches
    assert batches * batch >= wanted > (batches - 1) * batch
    with pytest.raises(UserError, match=rf"wanted {batches * batch + 1:,} tokens, but there are {batches * batch:,}"):
        schedule.num_steps(wanted, batches * batch)


@given(available=st.integers(0, 10**6), batch=st.integers(1, 10**4))
def test_minus_one_takes_every_whole_batch(available: int, batch: int) -> None:
    schedule = BatchSchedule.constant(BatchLayout(1, 1, 1, batch))
    if available < batch + 1:
        with pytest.raises(UserError):
            schedule.num_steps(-1, available)
    else:
        batches = schedule.num_steps(-1, available)
        assert batches * batch + 1 <= available < (batches + 1) * batch + 1


@given(
    ranks=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    microbatch=st.integers(1, 3),
    context=st.integers(1, 5),
    start=st.integers(0, 7),
)
def test_every_token_is_trained_on_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, accumulation: int, microbatch: int, context: int, start: int
) -> None:
    """Over all steps, accumulation steps and ranks, inputs and targets are the slice and the slice moved by one."""
    path = tmp_path_factory.getbasetemp() / "counting.safetensors"
    if not path.exists():
        save_file({"tokens": np.arange(1000, dtype=np.uint16)}, path)
    layout = BatchLayout(ranks, accumulation, microbatch, context)
    loader = TokenLoader(TokenFile(path), start, layout)
    steps = 3
    inputs, targets = [], []
    for step in range(steps):
        microbatches = [loader.microbatches(step, rank) for rank in range(ranks)]
        for a in range(accumulation):
            for rank in range(ranks):  # microbatch (step * A + a) * world_size + rank
                x_BxT, y_BxT = microbatches[rank][a].to(torch.device("cpu"))
                assert x_BxT.shape == y_BxT.shape == (microbatch, context)
                inputs += x_BxT.flatten().tolist()
                targets += y_BxT.flatten().tolist()
    count = steps * layout.global_tokens
    assert inputs == list(range(start, start + count))
    assert targets == list(range(start + 1, start + count + 1))


def test_twenty_gibibytes_open_at_once_and_take_no_memory(tmp_path: Path) -> None:
    count = 10 * 2**30
    header = json.dumps({"tokens": {"dtype": "U16", "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "train.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * count)  # a sparse file: no disk either
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
    assert sorted(folder.iterdir()) == before  # a user's folder is not written to
    memory = next((shop.datasets / ".scans").glob("*--train.json"))
    # What is remembered is used, and forgotten when the file changes.
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
    """Its `files` is an object, and it says nothing of tokenizer or counts: GPT-2's, unknown."""
    shop = Workshop(tmp_path)
    folder = shop.add_dataset()
    files = {"train": "train.safetensors", "validation": "validation.safetensors"}
    (folder / "meta.json").write_text(json.dumps({"description": "x", "token_dtype": "uint16", "files": files}))
    dataset = Dataset.open(shop.datasets, "local/letters")
    assert dataset.tokenizer == "gpt2"
    assert dataset.bytes_per_token("test") is None
