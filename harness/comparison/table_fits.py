"""Curves through the few points of a table of runs: loss over the global batch, and memory over the microbatch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from harness.common.statistics import fit_line
from harness.comparison.records import RunRecord
from harness.comparison.runs_table import RunsTable
from harness.comparison.table_text import paragraph
from harness.runs.results import MicrobatchSearch
from harness.runs.train_config import Affects, keys_affecting

LOSSES = ("test_loss", "validation_loss")  # the first that enough runs have
PARABOLA_POINTS = 3
# What may differ between runs whose losses show what the batch does: where and how often they are looked at, what they
# cost, and the seed. The machine may, too: it is what a batch is chosen for.
LEFT_OPEN = {
    *keys_affecting(Affects.BATCH),
    *keys_affecting(Affects.NOTHING),
    *("validation_interval", "validation_batches", "checkpoint_interval"),
    *("random_seed", "bucket_mb", "machine", "torch"),
}

Points = Sequence[tuple[float, float]]


def fit_lines(table: RunsTable) -> Iterator[str]:
    """Yield the fits in lines for a terminal; no loss fit where runs have one batch, or hardly any loss."""
    points = next((found for key in LOSSES if len(found := _points(table, key)) >= PARABOLA_POINTS), [])
    if len({batch for batch, _ in points}) >= PARABOLA_POINTS:
        others = [column.key for column in table.columns if column.is_setting and column.key not in LEFT_OPEN]
        if others:
            yield from paragraph(f"Loss over the global batch: inconclusive, because {others[0]} differs, too")
        else:
            yield from describe_batch_fit(points)
    yield from _memory_lines(table.records)


def _points(table: RunsTable, key: str) -> Points:
    """Global batches and losses: the measured ones, or, where nothing was measured, the reported ones."""
    batches = _numbers(table, "reported_global_batch") | _numbers(table, "global_batch")
    losses = _numbers(table, key)
    return [(batches[row], losses[row]) for row in losses if row in batches]


def _numbers(table: RunsTable, key: str) -> dict[int, float]:
    """Values of a column by row, for rows that have one."""
    cells = next((column.cells for column in table.columns if column.key == key), ())
    return {row: float(cell.value) for row, cell in enumerate(cells) if cell.value is not None}


def describe_batch_fit(points: Points) -> Iterator[str]:
    """The least-squares parabola of losses over the logarithm of global batches, at least three different ones, and the
    batch where it is lowest."""
    logarithms, losses = np.log([batch for batch, _ in points]), np.array([loss for _, loss in points])
    a, b, c = np.polyfit(logarithms, losses, 2)
    signed = (f"{'−' if each < 0 else '+'} {abs(each):.4f}" for each in (b, c))
    yield from paragraph(f"Loss over the global batch: {a:.4f} x² {next(signed)} x {next(signed)}, x = ln(sequences)")
    lowest = -b / (2 * a)
    if a > 0 and logarithms.min() <= lowest <= logarithms.max():
        said = f"lowest near {math.exp(lowest):.0f} sequences"
    else:
        said = "not lowest between these batches"
    miss = np.abs(np.polyval([a, b, c], logarithms) - losses).max()
    error = f"{len(points)} points, each within {miss:.3f} of it" if len(points) > 3 else "exactly through its 3 points"
    yield f"  {said} ({error})"


def _memory_lines(records: Sequence[RunRecord]) -> Iterator[str]:
    """Lines of the largest microbatches that were reported to fit on each machine, and of each run's searches by -f."""
    smallest: dict[float, float] = {}  # by memory: what fits on all such devices
    for reported in (record.reported for record in records if record.reported is not None):
        size, memory = reported.value("microbatch_size"), reported.memory_gib
        if size is not None and memory is not None:
            smallest[memory] = min(size, smallest.get(memory, math.inf))
    yield from describe_memory_fit([(size, gib) for gib, size in smallest.items()])
    for record in records:
        for search in record.results.of(MicrobatchSearch):
            yield from paragraph(f"{record.name}, -f on {search.device}:")
            yield from (f"  {line}" for line in describe_memory_fit(search_points(search)))


def search_points(search: MicrobatchSearch) -> Points:
    """The microbatches that a search with -f tried, and their peaks in GiB."""
    return [(each.microbatch_size, each.gib) for each in search.tried]


def describe_memory_fit(points: Points) -> Iterator[str]:
    """The least-squares line of GiB over the microbatch; nothing for fewer than two sizes."""
    line = fit_line(points)
    if line is None:
        return
    slope, fixed = line
    miss = max(abs(gib - slope * size - fixed) for size, gib in points)
    sign = "+" if fixed >= 0 else "-"
    yield from paragraph(f"Memory over the microbatch: {slope:.3f} GiB a sequence {sign} {abs(fixed):.2f} GiB")
    yield f"  ({len(points)} points, each within {miss:.2f} GiB of it)"
