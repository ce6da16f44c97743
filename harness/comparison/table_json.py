"""A table of runs as JSON: for every run its state and, by column, the value, how it came about and what must be known
of it."""

from __future__ import annotations

from typing import Any

from harness.comparison.against_baseline import BaselineComparison
from harness.comparison.runs_table import Cell, RunsTable


def table_json(table: RunsTable, comparison: BaselineComparison | None = None) -> dict[str, Any]:
    """`columns` by their keys; `runs` in the table's order, each with `values` by the same keys: null where there is
    none, with a `remark` that says why."""
    return {
        "columns": {
            column.key: {
                "title": column.title,
                "unit": column.unit,
                "measured_on": column.about,
                "lower_is_better": column.lower_is_better,
            }
            for column in table.columns
        },
        "runs": [
            {
                "name": record.name,
                "path": str(record.directory.path),
                "state": record.state.word,
                "detail": record.state.detail,
                "problems": list(record.problems),
                "values": {column.key: _cell(column.cells[row]) for column in table.columns},
            }
            for row, record in enumerate(table.records)
        ],
        "comparison": None if comparison is None else _comparison(comparison),
    }


def _comparison(comparison: BaselineComparison) -> dict[str, Any]:
    return {
        "title": comparison.title,
        "verdicts": [
            {
                "arm": verdict.arm,
                "baseline": verdict.baseline,
                "verdict": verdict.word.value,
                "sentence": verdict.sentence,
                "runs": list(verdict.runs),
                "difference": verdict.difference.value if verdict.difference else None,
                "interval": list(verdict.interval) if verdict.interval else None,
                "interval_level": verdict.level,
                "adjusted_p": verdict.adjusted_p,
            }
            for verdict in comparison.verdicts
        ],
        "seeds": comparison.closing,
        "notes": comparison.notes,
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {"value": cell.value, "reported": cell.is_reported, "remark": cell.remark}
