"""Stopping at any step, and resuming.

A run that is stopped and resumed ends like a run that was never stopped, bit for bit: weights, optimizer, scaler,
random states of each rank, position in the data, metrics except for times, and the best checkpoint so far.
"""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.runs.checkpoints import list_checkpoints
from tests.support.jobs import for_each
from tests.support.launch import Workshop
from tests.support.same_end import assert_same_end

pytestmark = pytest.mark.slow

STEPS = 12
SETTINGS: dict[str, Any] = {
    "learning_rate": 0.01,
    "lr_schedule": "cosine",
    "warmup_steps": 3,
    "clipping_max_norm": 0.5,
    "validation_interval": 2,
    "checkpoint_interval": 4,
    "report_interval": 3,
}
PRELUDE = "from tests.support.faults import *\nlively_scaler()\n"
# The numbers of ranks and of accumulated microbatches, the precision, and other settings; dropout is 0.1 in all.
Setup = tuple[int, int, str, dict[str, Any]]
MUON = {"optimizer": "muon", "muon_momentum_warmup_steps": STEPS}
SHARDED = {"shard_optimizer": True}
REPEATED = {"shuffle": True, "epochs": "repeat", "start_train_token": 9_000}  # in six or more passes
OTHERS: list[Setup] = [(1, 1, "fp32", MUON), (2, 1, "fp32", MUON | SHARDED), (2, 1, "fp16", SHARDED)]
OTHERS.append((2, 3, "fp32", REPEATED))
EVERY_SETUP: list[Setup] = [(*each, {}) for each in itertools.product((1, 2, 4), (1, 3), ("fp32", "fp16"))] + OTHERS
FEW_SETUPS: list[Setup] = [(2, 3, "fp16", {}), (4, 1, "fp32", {}), *OTHERS]


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path)
    shop.add_dataset(tokens=10_000)
    return shop


def planned_checkpoints(run: Path) -> dict[int, Path]:
    every = list_checkpoints(run / "checkpoints")
    return {step: path for step, path in every if json.loads((path / "meta.json").read_text())["planned"]}


def assert_same_run(one: Path, other: Path) -> None:
    """Assert that two runs have the same end, and the same bytes in the tensors of all planned checkpoints."""
    assert_same_end(one, other)
    planned = [planned_checkpoints(run) for run in (one, other)]
    assert list(planned[0]) == list(planned[1]) == [0, 4, 8, 11]
    for step, path in planned[0].items():
        for file in ("model.safetensors", "optimizer.pt", "scaler.pt", "train_state.pt"):
            assert (path / file).exists() == (planned[1][step] / file).exists()
            if (path / file).exists():
                assert (path / file).read_bytes() == (planned[1][step] / file).read_bytes(), (step, file)


def assert_lively(run: Path, precision: str) -> None:
    """Assert that the scaler's state changes during a run, so that comparing it shows something. The scale grows twice
    after the overflow, and the scaler counts steps since then."""
    files = [path / "scaler.pt" for path in planned_checkpoints(run).values()]
    assert all(file.exists() == (precision == "fp16") for file in files)
    if precision == "fp16":
        states = [torch.load(file, weights_only=True) for file in files]
        assert [state["scale"] for state in states] == [1024.0, 1024.0, 2048.0, 4096.0]
        assert [state["_growth_tracker"] for state in states] == [1, 0, 1, 1]
    assert json.loads((run / "summary.json").read_text())["skipped_steps"] == 1


@pytest.mark.fault("stopped at a step", "all ranks stop after the same step, which is saved; resumed, the same end")
def test_stopped_once(shop: Workshop, exhaustive: bool) -> None:
    def stop(case: tuple[int, Setup]) -> None:
        number, (ranks, accumulation, precision, others) = case
        own = SETTINGS | others | {"precision": precision, "gradient_accumulation_steps": accumulation}
        own["min_train_tokens"] = STEPS * ranks * accumulation * 2 * 16
        straight = shop.add_run(f"straight-{number}", **own)
        shop.train(straight.name, ranks=ranks, prelude=PRELUDE)
        assert_lively(straight, precision)
        # Each setup tries only some of the steps, because the work that is left after a step does not depend on how the
        # ranks share it.
        for step in range(number % 3, STEPS, 3) if exhaustive else [(8, 3)[number % 2]]:
            run = shop.add_run(f"stopped-{number}-{step}", **own)
            told = PRELUDE + f"before(STEP, tell(SIGTERM), rank={ranks - 1}, step={step})"  # one rank alone
            ended = shop.train(run.name, ranks=ranks, prelude=told, expect=None)
            # In the last two steps the other ranks may learn of it after the last step.
            if ranks == 1 or step < STEPS - 2 or ended.status:
                assert ended.status == 128 + signal.SIGTERM
                (line,) = ended.error_lines
                last = int(line.partition("after global step ")[2].partition(";")[0])
                assert last in (step, step + 1)
                assert (run / "checkpoints" / "latest").resolve().name.endswith(f"-iteration-{last}")
            shop.train(run.name, ranks=ranks, prelude=PRELUDE)
            assert_same_run(straight, run)

    for_each(enumerate(EVERY_SETUP if exhaustive else FEW_SETUPS), stop, at_once=2)


# Batch layouts: the numbers of ranks, of sequences in a microbatch, and of accumulated microbatches
SHAPES = [(2, 2, 2), (1, 3, 1), (3, 1, 2), (4, 2, 1), (2, 1, 3)]
FIRST_TOKEN, TOKENS = 123, 2000


@pytest.mark.fault("continued on another number of ranks, in another batch layout", "each token is trained on once")
def test_another_shape(shop: Workshop, exhaustive: bool) -> None:
    """When world size, microbatch and accumulation change at every stop, no token is trained on twice and none is left
    out."""
    there_and_back = [[one, other, one] for one, other in itertools.combinations(SHAPES, 2)]
    for number, shapes in enumerate([*there_and_back, SHAPES] if exhaustive else [SHAPES[:3]]):
        name, seen = f"shapes-{number}", shop.path / f"windows-{number}"
        seen.mkdir()
        record = f"from tests.support.faults import *\nrecord_windows({str(seen)!r})\n"
        stopping, expected = "before(STEP, tell(SIGTERM), rank=0, call=2)", 128 + signal.SIGTERM
        for index, (ranks, microbatch, accumulation) in enumerate(shapes):
            if index == len(shapes) - 1:  # all parts but the last are two steps long
                stopping, expected = "", 0
            layout = {"microbatch_size": microbatch, "gradient_accumulation_steps": accumulation}
            run = shop.add_run(name, min_train_tokens=TOKENS, start_train_token=FIRST_TOKEN, **layout)
            shop.train(name, ranks=ranks, prelude=record + stopping, expect=expected)
        lines = [line for path in seen.iterdir() for line in path.read_text().splitlines()]
        end = FIRST_TOKEN
        for start, count in sorted([int(number) for number in line.split()] for line in lines):
            assert start == end, f"{shapes}: tokens {min(start, end)} to {max(start, end)}"
            end = start + count
        meta = json.loads((run / "checkpoints" / "latest" / "meta.json").read_text())
        assert end - FIRST_TOKEN == meta["tokens_seen"] >= TOKENS
