"""Stopping at any step, and resuming.

A run that is stopped and resumed ends like a run that was never stopped, bit for bit: weights, optimizer, scaler,
random states of each rank, position in the data, metrics except for times, and the best checkpoint so far.
"""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Setup:
    """One way to train the same twelve steps; dropout is 0.1 in all of them."""

    ranks: int
    accumulation: int
    precision: str
    optimizer: str = "adamw"
    shard_optimizer: bool = False

    @property
    def name(self) -> str:
        shared = "-sharded" if self.shard_optimizer else ""
        return f"{self.ranks}-{self.accumulation}-{self.precision}-{self.optimizer}{shared}"

    def add_run(self, shop: Workshop, name: str) -> Path:
        own: dict[str, Any] = {"gradient_accumulation_steps": self.accumulation, "precision": self.precision}
        own |= {"optimizer": self.optimizer, "shard_optimizer": self.shard_optimizer}
        if self.optimizer == "muon":
            own["muon_momentum_warmup_steps"] = STEPS
        tokens = STEPS * self.ranks * self.accumulation * 2 * 16
        return shop.add_run(name, **SETTINGS, **own, min_train_tokens=tokens)


OTHER_OPTIMIZERS = [
    Setup(1, 1, "fp32", "muon"),
    Setup(2, 1, "fp32", "muon", shard_optimizer=True),
    Setup(2, 1, "fp16", "adamw", shard_optimizer=True),
]
EVERY_SETUP = [Setup(*values) for values in itertools.product((1, 2, 4), (1, 3), ("fp32", "fp16"))] + OTHER_OPTIMIZERS
FEW_SETUPS = [Setup(2, 3, "fp16"), Setup(4, 1, "fp32"), *OTHER_OPTIMIZERS]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("continuation"))
    shop.add_dataset(tokens=10_000)
    return shop


@pytest.fixture(scope="module")
def setups(request: pytest.FixtureRequest) -> list[Setup]:
    return EVERY_SETUP if request.config.getoption("--exhaustive") else FEW_SETUPS


@pytest.fixture(scope="module")
def straight(shop: Workshop, setups: list[Setup]) -> dict[Setup, Path]:
    """For each setup, the run that was never stopped."""
    runs = {}
    for setup in setups:
        runs[setup] = setup.add_run(shop, f"straight-{setup.name}")
        shop.train(runs[setup].name, ranks=setup.ranks, prelude=PRELUDE)
    return runs


def planned_checkpoints(run: Path) -> Iterator[tuple[int, Path]]:
    for step, path in list_checkpoints(run / "checkpoints"):
        if json.loads((path / "meta.json").read_text())["planned"]:
            yield step, path


def assert_same_run(one: Path, other: Path) -> None:
    """Assert that two runs have the same end, the same bytes in the tensors of all planned checkpoints, and the same
    best checkpoint."""
    assert_same_end(one, other)
    planned = [dict(planned_checkpoints(run)) for run in (one, other)]
    assert list(planned[0]) == list(planned[1]) == [0, 4, 8, 11]
    for step, path in planned[0].items():
        for file in ("model.safetensors", "optimizer.pt", "scaler.pt", "train_state.pt"):
            assert (path / file).exists() == (planned[1][step] / file).exists()
            if (path / file).exists():
                assert (path / file).read_bytes() == (planned[1][step] / file).read_bytes(), (step, file)
    best = [(run / "checkpoints" / "best").resolve().name.partition("-")[2] for run in (one, other)]
    assert best[0] == best[1]


@pytest.mark.timeout(900)
@pytest.mark.fault(
    "stopped at a step", "all ranks stop after the same step with a checkpoint; continued to the same end"
)
def test_stopped_once(shop: Workshop, setups: list[Setup], straight: dict[Setup, Path], exhaustive: bool) -> None:
    # Each setup tries only some of the steps, because the work that is left after a step does not depend on how the
    # ranks share it.
    steps = [range(at % 3, STEPS, 3) if exhaustive else [(3, 8)[at % 2]] for at in range(len(setups))]
    cases = [(setup, step) for setup, own in zip(setups, steps, strict=True) for step in own]

    def stop_once(case: tuple[Setup, int]) -> None:
        setup, step = case
        run = setup.add_run(shop, f"once-{step}-{setup.name}")
        told = PRELUDE + f"before(STEP, tell(SIGTERM), rank={setup.ranks - 1}, step={step})"  # one rank alone
        ended = shop.train(run.name, ranks=setup.ranks, prelude=told, expect=None)
        # In the last two steps the other ranks may learn of it after the last step.
        if setup.ranks == 1 or step < STEPS - 2 or ended.status:
            assert ended.status == 128 + signal.SIGTERM
            (line,) = ended.error_lines
            last = int(line.partition("after global step ")[2].partition(";")[0])
            assert last in (step, step + 1)
            assert (run / "checkpoints" / "latest").resolve().name.endswith(f"-iteration-{last}")
        shop.train(run.name, ranks=setup.ranks, prelude=PRELUDE)
        assert_same_run(straight[setup], run)

    for_each(cases, stop_once, at_once=2)


def test_the_scaler_has_a_state_to_lose(straight: dict[Setup, Path]) -> None:
    """The scaler's state changes in the runs above, so that comparing it shows something. The scale grows twice after
    the overflow, and the scaler counts steps since then."""
    for setup, run in straight.items():
        files = [path / "scaler.pt" for _, path in planned_checkpoints(run)]
        assert all(file.exists() == (setup.precision == "fp16") for file in files)
        if setup.precision == "fp16":
            states = [torch.load(file, weights_only=True) for file in files]
            assert [state["scale"] for state in states] == [1024.0, 1024.0, 2048.0, 4096.0]
            assert [state["_growth_tracker"] for state in states] == [1, 0, 1, 1]
        summary = json.loads((run / "summary.json").read_text())
        assert summary["skipped_steps"] == 1


@dataclass(frozen=True)
class Shape:
    """Batch layout of a part of a run."""

    ranks: int
    microbatch: int
    accumulation: int


SHAPES = [Shape(2, 2, 2), Shape(1, 3, 1), Shape(3, 1, 2), Shape(4, 2, 1), Shape(2, 1, 3)]
FIRST_TOKEN, TOKENS = 123, 2000


@pytest.mark.timeout(900)
@pytest.mark.fault(
    "continued on another number of ranks",
    "with another microbatch and accumulation, too: each token is trained on exactly once",
)
def test_another_shape(tmp_path: Path, exhaustive: bool) -> None:
    """When world size, microbatch and accumulation change at every stop, no token is trained on twice and none is left
    out."""
    shop = Workshop(tmp_path)
    shop.add_dataset(tokens=10_000)
    there_and_back = [[one, other, one] for one, other in itertools.combinations(SHAPES, 2)]
    for number, shapes in enumerate([*there_and_back, SHAPES] if exhaustive else [SHAPES[:3]]):
        seen = tmp_path / f"windows-{number}"
        seen.mkdir()
        run = train_in_shapes(shop, f"shapes-{number}", shapes, seen)
        end = FIRST_TOKEN
        for start, count in sorted(windows_in(seen)):
            assert start == end, f"{shapes}: tokens {min(start, end)} to {max(start, end)}"
            end = start + count
        meta = json.loads((run / "checkpoints" / "latest" / "meta.json").read_text())
        assert end - FIRST_TOKEN == meta["tokens_seen"] >= TOKENS


def train_in_shapes(shop: Workshop, name: str, shapes: list[Shape], seen: Path) -> Path:
    """Train a run to its end in several parts, each with another batch layout. All parts but the last are two steps
    long."""
    record = f"from tests.support.faults import *\nrecord_windows({str(seen)!r})\n"
    for index, shape in enumerate(shapes):
        run = shop.add_run(
            name,
            min_train_tokens=TOKENS,
            start_train_token=FIRST_TOKEN,
            microbatch_size=shape.microbatch,
            gradient_accumulation_steps=shape.accumulation,
        )
        is_last = index == len(shapes) - 1
        stopping = "" if is_last else "before(STEP, tell(SIGTERM), rank=0, call=2)"
        expected = 0 if is_last else 128 + 15
        shop.train(name, ranks=shape.ranks, prelude=record + stopping, expect=expected)
    return run


def windows_in(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield (first token, number of tokens) of every window that any process trained on."""
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            start, count = line.split()
            yield int(start), int(count)
