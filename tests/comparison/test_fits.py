"""Curves through few points: the notebook's to the printed digits, and closed forms."""

from __future__ import annotations

import math

from harness.comparison.table_fits import describe_batch_fit, describe_memory_fit
from harness.runs.directory import RunDirectory
from harness.runs.reported import read_reported
from tests.support.isolation import SHIPPED_RUNS

NOTEBOOK = ["8xa100m40", "8xh100m80", "8xa100m80", "8xb200m160", "original"]


def test_the_notebooks_curve_of_loss_over_batch() -> None:
    """Its coefficients, as it printed them: 0.032313, -0.295715 and 4.368746 in the natural logarithm of the batch."""
    points = []
    for name in NOTEBOOK:
        found = read_reported(RunDirectory(SHIPPED_RUNS / name))
        assert found is not None
        batch, loss = found.value("global_batch_size"), found.value("test_loss")
        assert batch is not None
        assert loss is not None
        points.append((batch, loss))
    assert points == [(104, 3.674), (216, 3.725), (224, 3.73), (512, 3.771), (6, 3.944)]
    assert list(describe_batch_fit(points)) == [
        "Loss over the global batch: 0.0323 x² − 0.2957 x + 4.3687, x = ln(sequences)",
        "  lowest near 97 sequences (5 points, each within 0.018 of it)",
    ]


def test_the_notebooks_line_of_memory_over_microbatch() -> None:
    assert list(describe_memory_fit([(6, 24), (13, 40), (27, 80), (64, 160)])) == [
        "Memory over the microbatch: 2.346 GiB a sequence + 11.48 GiB",
        "  (4 points, each within 5.17 GiB of it)",
    ]
    assert list(describe_memory_fit([(6, 24)])) == list(describe_memory_fit([(6, 24), (6, 25)])) == []


def test_a_curve_that_is_not_lowest_between_its_batches() -> None:
    bent, beyond = [(1.0, 1.0), (math.e, 2.0), (math.e**2, 1.0)], [(2.0, 5.0), (4.0, 3.0), (8.0, 2.0)]
    for points in (bent, beyond):
        assert (
            list(describe_batch_fit(points))[1] == "  not lowest between these batches (exactly through its 3 points)"
        )
