"""The two curves that a table of runs may hold: loss over the global batch, and memory over the microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.analysis.fits import (
    Point,
    describe_batch_fit,
    describe_memory_fit,
    fit_parabola,
    fit_search,
    fit_straight,
    smallest_at_each_memory,
)
from harness.analysis.records import RunRecord
from harness.analysis.runs_table import RunsTable
from harness.analysis.table_text import paragraph
from harness.runs.throughput import BATCH_KEYS

LOSSES = ("test_loss", "validation_loss")  # the first that enough runs have
PARABOLA_POINTS = 3
# What may differ between runs whose losses show what the batch does: where and how often they are looked at, what they
# cost, and the seed. The machine may, too: it is what a batch is chosen for.
LEFT_OPEN = {
    *BATCH_KEYS,
    *("validation_interval", "validation_batches", "validation_ranks", "checkpoint_interval", "keep_checkpoints"),
    *("async_checkpoint", "weights_check_interval", "report_interval", "price_per_hour", "random_seed"),
    *("benchmark_interval", "benchmark_tasks", "benchmark_examples", "sample_interval", "sample_prompt"),
    *("max_skipped_steps", "bucket_mb", "machine", "torch"),
}


def fit_lines(table: RunsTable) -> Iterator[str]:
    """In lines for a terminal; nothing where runs have one batch, or hardly any loss."""
    yield from _batch_lines(table)
    yield from _memory_lines(table.records)


def _batch_lines(table: RunsTable) -> Iterator[str]:
    points = next((found for key in LOSSES if len(found := _points(table, key)) >= PARABOLA_POINTS), [])
    if len({batch for batch, _ in points}) < PARABOLA_POINTS:
        return
    others = [column.key for column in table.columns if column.is_setting and column.key not in LEFT_OPEN]
    if others:
        yield from paragraph(f"Loss over the global batch: inconclusive, because {others[0]} differs, too")
    else:
        yield from describe_batch_fit(fit_parabola(points))


def _points(table: RunsTable, key: str) -> list[Point]:
    """Global batches and losses: the measured ones, or, where nothing was measured, the reported ones."""
    batches = _numbers(table, "reported_global_batch") | _numbers(table, "global_batch")
    losses = _numbers(table, key)
    return [(batches[row], losses[row]) for row in losses if row in batches]


def _numbers(table: RunsTable, key: str) -> dict[int, float]:
    """By row, where there are any."""
    cells = next((column.cells for column in table.columns if column.key == key), ())
    return {row: float(cell.value) for row, cell in enumerate(cells) if cell.value is not None}


def _memory_lines(records: Sequence[RunRecord]) -> Iterator[str]:
    """Of the largest microbatches that were reported to fit on each machine, and of each run's own search by -f."""
    reported = [record.reported for record in records if record.reported is not None]
    sizes = [(each.value("microbatch_size"), each.memory_gib) for each in reported]
    points = smallest_at_each_memory([(size, memory) for size, memory in sizes if size is not None])
    if len(points) > 1:
        yield from describe_memory_fit(fit_straight(points))
    for record in records:
        for search in record.searches.found:
            yield from paragraph(f"{record.name}, -f on {search.device}:")
            yield from (f"  {line}" for line in describe_memory_fit(fit_search(search)))
