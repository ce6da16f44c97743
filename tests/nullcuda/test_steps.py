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

GIB = 2**30
# The runs with real widths and few layers, as they are trained: on SM 80, 90 or 100, by this number of ranks.
TWO_LAYERS = {"n_layers": 2}
SHIPPED: dict[str, tuple[int, int]] = {
    "8xa100m40": (80, 8),
    "8xa100m80": (80, 8),
    "8xb200m160": (100, 8),
    "8xh100m80": (90, 8),
    "original": (90, 1),
    "8xa100m40-fast": (80, 8),
    "8xh100m80-fast": (90, 8),
    "quickstart": (90, 1),
    "quickstart-gpt2": (90, 2),
}
STEPS = (1, 1, 2, 1)  # microbatches in each step, as in a batch ramp


def steps(run: str, *, sm: int = 90, gib: float = 79.1, **asked: Any) -> list[dict[str, int]]:
    """Return what the null device counted in each step of a run."""
    request = {"folder": str(SHIPPED_RUNS), "run": run, "microbatches": STEPS, **asked}
    command = [sys.executable, "-m", "tests.nullcuda.steps", json.dumps(request)]
    done = subprocess.run(
        command, env=environment(sm=sm, gib=gib), cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found: list[dict[str, int]], ranks: int) -> None:
    """Assert that no step after the first waits, compiles, allocates or keeps more memory, whatever its microbatches.

    DDP's own timers wait for eight events in each of the first steps.
    """
    first, *later = found
    for each in later:
        assert (each["waits"], each["to_host"], each["compiled"], each["breaks"]) == (0, 0, 0, 0)
        assert each["event_waits"] <= (8 if ranks > 1 else 0)
        assert each["allocated"] == first["allocated"]
    assert found[2]["allocations"] == found[3]["allocations"] == 0, "the second step has made the optimizer's state"
    assert found[1]["launches"] == found[3]["launches"]
    assert found[1]["to_device"] == 2, "the tokens and the learning rate"


@pytest.mark.parametrize("run", SHIPPED)
@pytest.mark.slow
def test_a_compiled_step_never_waits_and_is_compiled_once(run: str) -> None:
    sm, ranks = SHIPPED[run]
    model = {} if run.startswith("quickstart") else TWO_LAYERS
    found = steps(run, sm=sm, ranks=ranks, model=model, train={"compile": True})
    check(found, ranks)
    print(run, found[3])
