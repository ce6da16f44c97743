"""Steps of the shipped runs on the null device: no waits, no recompilation, launches, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.nullcuda.device import environment, why_not
from tests.support.isolation import ROOT, SHIPPED_RUNS

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

EAGER = {"compile": False}
TWO_LAYERS: dict[str, Any] = {"n_layers": 2}
TWO_FAST_LAYERS: dict[str, Any] = {"n_layers": 2, "value_embeddings": 1}
EXPERTS: dict[str, Any] = {"n_layers": 2, "moe": {"num_experts": 4, "num_active_experts": 2}}
# Run, compute capability times 10, ranks, changes of model.json and train.json, launches of a step. The widths are
# those of the shipped runs.
Case = tuple[str, int, int, dict[str, Any], dict[str, Any], int]
CASES: dict[str, Case] = {
    "gpt-2 on H100s": ("8xh100m80", 90, 8, TWO_LAYERS, EAGER, 825),
    "in fp16": ("8xa100m40", 80, 8, TWO_LAYERS, EAGER | {"precision": "fp16"}, 509),
    "deterministic": ("8xh100m80", 90, 8, TWO_LAYERS, EAGER | {"deterministic": True}, 1623),
    "with activation checkpointing": ("8xh100m80", 90, 1, TWO_LAYERS, EAGER | {"activation_checkpointing": True}, 865),
    "experts on B200s": ("8xh100m80", 100, 8, EXPERTS, EAGER, 1017),
}
FAST = "gpt-2 on H100s"  # the case that the quick tests include
MICROBATCHES = (1, 1, 2, 1)  # of each step, as in a batch ramp
RESERVE = 3 * 2**28  # bytes that -f keeps free


def run(module: str, *, sm: int = 90, gib: float = 79.1, **asked: Any) -> list[dict[str, Any]]:
    """Run a module of this folder on the null device. Returns the objects of its lines of JSON."""
    command = [sys.executable, "-m", f"tests.nullcuda.{module}", json.dumps({"folder": str(SHIPPED_RUNS), **asked})]
    variables = environment(sm=sm, gib=gib)
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    "case", [each if each == FAST else pytest.param(each, marks=pytest.mark.slow) for each in CASES]
)
def test_a_step_never_waits_and_keeps_no_more_memory(case: str) -> None:
    """After the first step, no step waits for the device, compiles anything, or keeps more memory than the one before,
    whatever its number of microbatches. DDP's own timers wait for eight events in each of its first steps."""
    assert_no_waits(CASES[case])


def assert_no_waits(case: Case) -> None:
    """Train the steps of a case, and assert what test_a_step_never_waits_and_keeps_no_more_memory promises."""
    name, sm, ranks, model, train, launches = case
    found = run("steps", sm=sm, run=name, ranks=ranks, model=model, train=train, microbatches=MICROBATCHES)
    for each in found[1:]:
        assert (each["waits"], each["to_host"], each["compiled"], each["breaks"]) == (0, 0, 0, 0)
        assert each["event_waits"] <= (8 if ranks > 1 else 0)
        assert each["allocated"] == found[0]["allocated"]
    assert found[3]["allocations"] == 0, "the optimizer's state and the sums of two microbatches were allocated earlier"
    assert found[1]["launches"] == found[3]["launches"] == pytest.approx(launches, rel=0.05)
    assert found[3]["to_device"] == 2, "the tokens and the learning rate"


@pytest.mark.slow
def test_a_sharded_state_is_copied_without_a_wait() -> None:
    """The weights and the state of eight ranks are enqueued as copies to pinned host memory, from which nothing waits.
    A shard of another rank takes device memory for one message at a time."""
    model = TWO_FAST_LAYERS | {"bigram_embedding": 4096}
    found = run("steps", sm=80, run="8xa100m40-fast", ranks=8, model=model, train=EAGER, microbatches=[1, 1], saves=2)
    step, save = found[1], found[3]
    assert (save["waits"], save["event_waits"], save["allocations"]) == (0, 0, 0)
    assert save["to_host"] > 50
    assert save["allocated"] == step["allocated"]
    assert save["peak_allocated"] <= step["allocated"] + 2**28 < step["peak_allocated"]


@pytest.mark.slow
def test_the_microbatch_that_f_finds_trains_on_eight_ranks() -> None:
    """The answer of -f on one rank, whose gradients are in no buckets, holds for training by DistributedDataParallel. A
    microbatch that is 5 % larger does not fit."""
    (found,) = run("search", run="8xh100m80-fast", gib=24, ranks=8, train=EAGER)
    assert found["larger"] == "out of memory"
    assert found["trained"] < found["searched"] + RESERVE
