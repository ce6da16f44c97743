"""Curves fitted to the runs of a table: loss over the global batch, and memory over the microbatch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from harness.comparison.arms import SEED, SEEDS, WITHOUT_EFFECT
from harness.comparison.table import Cell, RunsTable
from harness.runs.train_config import Affects, keys_affecting

LEAST_BATCHES = 3
UNFINISHED = ("going on", "stopped", "failed", "diverged")  # states of runs whose losses are not those at the end
LARGEST_RATIO = 1.02  # of tokens: a budget is rounded to whole global batches
# Settings that may differ between the runs of the fit over the global batch. The machine may differ, because the batch
# is chosen to suit it.
LEFT_OPEN = {
    *keys_affecting(Affects.BATCH),
    *WITHOUT_EFFECT,
    SEED,
    *SEEDS,
    "validation_interval",
    "validation_sequences",
    "validation_batches",
    "checkpoint_interval",
}
LEFT_OPEN |= {"bucket_mb", "machine", "torch"}


def fits(table: RunsTable) -> Iterator[str]:
    """Yield a sentence on each fit that the runs allow.

    - Test losses, or else validation losses, over the global batch size. The sentence says "inconclusive" if the
      numbers of tokens differ by more than 2 %, or if a setting outside LEFT_OPEN differs.
    - Device memory over the microbatch size, both from reported.json.
    """
    columns = {column.key: column.cells for column in table.columns}

    def numbers(key: str) -> list[Any]:
        """Return each run's number in the column `key`, or else in the column `reported_{key}`, or else None."""
        own = columns.get(key, (Cell(None, ""),) * len(table.records))
        theirs = columns.get(f"reported_{key}", own)
        return [mine.value if mine.value is not None else other.value for mine, other in zip(own, theirs, strict=True)]

    rows = list(zip(table.records, numbers("global_batch"), numbers("tokens"), strict=True))
    for losses in (columns.get(key, ()) for key in ("test_loss", "validation_loss")):
        found = [
            (batch, loss.value, tokens)
            for (record, batch, tokens), loss in zip(rows, losses, strict=False)
            if record.state.word not in UNFINISHED and None not in (batch, loss.value)
            if not (record.summary and record.summary.has_diverged)
        ]
        if len({batch for batch, _, _ in found}) >= LEAST_BATCHES:
            others = [each.title for each in table.columns if each.is_setting and each.title not in LEFT_OPEN]
            tokens = [each for _, _, each in found if each is not None]
            if tokens and max(tokens) > LARGEST_RATIO * min(tokens):
                others.append("the number of tokens")
            reason = f"Loss over the global batch: inconclusive, because {others[0]} differs, too" if others else ""
            yield reason or _batch_fit([(batch, loss) for batch, loss, _ in found])
            break
    # The smallest microbatch that is reported for each device memory, because it fits on all devices with this memory.
    smallest: dict[float, float] = {}
    for reported in (each.reported for each in table.records if each.reported is not None):
        size, memory = reported.value("microbatch_size"), reported.memory_gib
        if size is not None and memory is not None:
            smallest[memory] = min(size, smallest.get(memory, math.inf))
    if len({*smallest.values()}) > 1:
        sizes, gib = np.array([*smallest.values()]), np.array([*smallest])
        slope, fixed = np.polyfit(sizes, gib, 1)
        miss = np.abs(gib - slope * sizes - fixed).max()
        line = f"{slope:.3f} GiB a sequence {'+' if fixed >= 0 else '-'} {abs(fixed):.2f} GiB"
        yield f"Memory over the microbatch: {line} ({len(smallest)} points, each within {miss:.2f} GiB of this line)"


def _batch_fit(points: Sequence[tuple[float, float]]) -> str:
    """Return a sentence with the least-squares parabola of the losses over ln(sequences per global batch), and its
    lowest point if that is between these batch sizes."""
    x, losses = np.log([batch for batch, _ in points]), np.array([loss for _, loss in points])
    a, b, c = np.polyfit(x, losses, 2)
    lowest, miss = -b / (2 * a), np.abs(np.polyval([a, b, c], x) - losses).max()
    is_inside = round(a, 4) > 0 and x.min() <= lowest <= x.max()  # equal losses give an `a` of rounding errors
    where = (
        f"lowest near {math.exp(lowest):.0f} sequences" if is_inside else "no lowest point between these batch sizes"
    )
    terms = " ".join(f"{'−' if each < 0 else '+'} {abs(each):.4f}{power}" for each, power in ((b, " x"), (c, "")))
    within = f"{len(points)} points, each within {miss:.3f} nats of this curve"
    return f"Loss over the global batch: {a:.4f} x² {terms}, x = ln(sequences); {where} ({within})"
