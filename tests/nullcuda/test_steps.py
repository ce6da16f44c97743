"""Steps of the shipped runs on the null device: no waits, no recompilation, launches, memory."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, NamedTuple

import pytest

from tests.nullcuda import device
from tests.nullcuda.device import why_not
from tests.support.isolation import SHIPPED_RUNS

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

EAGER = {"compile": False}
TWO_LAYERS: dict[str, Any] = {"n_layers": 2}
TWO_FAST_LAYERS: dict[str, Any] = {"n_layers": 2, "value_embeddings": 1}
EXPERTS: dict[str, Any] = {"n_layers": 2, "moe": {"num_experts": 4, "num_active_experts": 2}}


class Case(NamedTuple):
    """A shipped run with its own widths, and the measurements of a step with one microbatch."""

    run: str
    ranks: int
    model: dict[str, Any]  # changes of model.json and train.json
    train: dict[str, Any]
    launches: int
    peak_gib: float | None = None
    broadcasts: int = 0  # messages of a sharded optimizer


# By compute capability times 10. Each group is measured by one process, in this order; what is deterministic stays so.
GROUPS: dict[str, tuple[int, dict[str, Case]]] = {
    "quick": (90, {"gpt-2": Case("8xh100m80", 8, TWO_LAYERS, EAGER, 825, 4.075)}),
    "A100": (
        80,
        {
            "the fast model, with ZeRO-1 and Muon": Case("8xa100m40-fast", 8, TWO_FAST_LAYERS, EAGER, 2171, 11.732, 24),
            "gpt-2 on 80 GB": Case("8xa100m80", 8, TWO_LAYERS, EAGER, 900, 4.158),
            "with tied weights": Case("gpt2-124m", 8, TWO_LAYERS, EAGER, 1026, 3.713),
            "in fp16": Case("8xa100m40", 8, TWO_LAYERS, EAGER | {"precision": "fp16"}, 509, 3.144),
        },
    ),
    "H100": (
        90,
        {
            "the fast model, Muon on one GPU": Case("8xh100m80-fast", 1, TWO_FAST_LAYERS, EAGER, 2312, 12.475),
            "activation checkpointing": Case(
                "8xh100m80", 1, TWO_LAYERS, EAGER | {"activation_checkpointing": True}, 865, 2.374
            ),
            "deterministic": Case("8xh100m80", 8, TWO_LAYERS, EAGER | {"deterministic": True}, 1623, 4.075),
        },
    ),
    "B200": (
        100,
        {
            "gpt-2": Case("8xb200m160", 8, TWO_LAYERS, EAGER, 1761, 6.532),
            "experts": Case("8xh100m80", 8, EXPERTS, EAGER, 1017, 5.583),
        },
    ),
}
MICROBATCHES = (2, 1, 2, 1)  # of each step; more and fewer than in the step before


def run(*requests: dict[str, Any], sm: int = 90) -> list[list[dict[str, Any]]]:
    """Measure requests of steps.py in one process, on the null device. Returns the objects of each one's lines."""
    asked = [{"folder": str(SHIPPED_RUNS), "microbatches": MICROBATCHES, **request} for request in requests]
    done = device.run("-m", "tests.nullcuda.steps", json.dumps(asked), sm=sm)
    return [[json.loads(line) for line in part.splitlines()] for part in done.stdout.split("\n\n") if part.strip()]


@cache
def measured(group: str) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of each case of a group. Those of "sharded" are two steps and two copies of a sharded state."""
    sm, cases = GROUPS[group]
    requests = {
        name: {key: value for key, value in case._asdict().items() if key in ("run", "ranks", "model", "train")}
        for name, case in cases.items()
    }
    if group == "A100":
        sharded = TWO_FAST_LAYERS | {"bigram_embedding": 4096}
        more = {"ranks": 8, "train": EAGER | {"microbatch_size": 13}}
        requests["sharded"] = {"run": "8xa100m40-fast", "model": sharded, **more, "microbatches": [1, 1], "saves": 2}
        requests["experts"] = {"run": "8xa100m40", "model": EXPERTS, **more, "may_wait": True}
    if group == "H100":
        more = {"ranks": 8, "train": EAGER | {"precision": "fp32", "microbatch_size": 4}}
        requests["experts in fp32"] = {"run": "8xh100m80", "model": EXPERTS, **more, "may_wait": True}
    return dict(zip(requests, run(*requests.values(), sm=sm), strict=True))


@pytest.mark.parametrize(
    ("group", "case"),
    [
        pytest.param(group, case, marks=[] if group == "quick" else pytest.mark.slow)
        for group, (_, cases) in GROUPS.items()
        for case in cases
    ],
)
def test_a_step_never_waits_and_keeps_no_more_memory(group: str, case: str) -> None:
    """After the first step, no step waits for the device, compiles anything, or keeps more memory than the one before,
    whatever its number of microbatches. DDP's own timers wait for eight events in each of its first steps."""
    assert_no_waits(measured(group)[case], GROUPS[group][1][case])


def assert_no_waits(found: list[dict[str, Any]], case: Case, *, tolerance: float = 0.002) -> None:
    """Assert what test_a_step_never_waits_and_keeps_no_more_memory promises of a case's steps. `tolerance` is that of
    the number of launches, which is exact without compilation."""
    for each in found[1:]:
        assert (each["waits"], each["to_host"], each["compiled"], each["breaks"]) == (0, 0, 0, 0)
        assert each["event_waits"] <= (8 if case.ranks > 1 else 0)
        assert each["allocated"] == found[0]["allocated"]
    assert found[3]["allocations"] == 0, "the optimizer's state and the sums of two microbatches were allocated earlier"
    assert found[0]["peak_allocated"] <= 1.01 * found[2]["peak_allocated"], "the first step needs no more than others"
    assert found[1]["launches"] == found[3]["launches"] == pytest.approx(case.launches, rel=tolerance)
    assert found[3]["to_device"] == 2, "the tokens and the learning rate"
    assert {each["broadcasts"] for each in found} == {case.broadcasts}
    if case.peak_gib is not None:
        assert found[3]["peak_allocated"] / 2**30 == pytest.approx(case.peak_gib, rel=0.01)
    assert found[3].get("programs") == found[0].get("programs"), "the second validation compiles nothing"


@pytest.mark.slow
def test_a_sharded_state_is_copied_without_a_wait() -> None:
    """The weights and the state of eight ranks are enqueued as copies to pinned host memory, from which nothing waits.
    A shard of another rank takes device memory for one message at a time."""
    _, step, _, save = measured("A100")["sharded"]
    assert (save["waits"], save["event_waits"], save["allocations"]) == (0, 0, 0)
    assert save["to_host"] > 50
    assert save["allocated"] == step["allocated"]
    assert save["peak_allocated"] <= step["allocated"] + 2**28 < step["peak_allocated"]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "case"), [("A100", "experts"), ("H100", "experts in fp32")])
def test_experts_wait_except_in_bf16_on_newer_gpus(group: str, case: str) -> None:
    """On Ampere, and in fp32 on Hopper, torch's grouped products wait for a copy to the host six times a layer and
    microbatch, as users are told. Nothing else waits."""
    found = measured(group)[case]
    for step, microbatches in list(zip(found, MICROBATCHES, strict=True))[1:]:
        assert step["to_host"] == 6 * 2 * microbatches
        assert step["waits"] == 2 * step["to_host"], "for the pageable copy, and for the stream"
        assert step["allocated"] == found[0]["allocated"]
