"""A comparison as one HTML file that needs no network and no script: verdicts, table, curves and provenance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.common.errors import printable
from harness.comparison.against_baseline import BaselineComparison
from harness.comparison.charts import AXES, chart_note, charts_of, svg
from harness.comparison.fits import fits
from harness.comparison.records import RunRecord
from harness.comparison.table import LOSSES, Column, RunsTable, below_lines, cut_names, is_number, machine_of
from harness.runs.results import Result


def render(
    table: RunsTable,
    comparison: BaselineComparison | None,
    references: Mapping[str, float],
    baseline: str | None = None,
    made: str = "",
) -> str:
    """Return the page's HTML. All text from files is escaped. `references` are losses by label, drawn as lines. `made`
    says when and by which command the page was made."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names of runs may come from other people
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else printable(value),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    charts = charts_of(table.records, [*AXES], baseline)
    drawn = [chart for chart in charts if chart.curves]
    alike = [column for column in table.columns if column.is_alike]
    columns = sorted((column for column in table.columns if column not in alike), key=lambda each: _rank(each, table))
    return environment.get_template("page.html.j2").render(
        table=table,
        names=cut_names([record.name for record in table.records]),
        columns=columns,
        comparison=comparison,
        is_number=is_number,
        below=[*below_lines(table, alike)],
        remarks=[
            *(f"{column.title}: measured on {column.about}" for column in columns if column.about),
            *(problem for record in table.records for problem in record.problems),
            *fits(table),
            *dict.fromkeys(problem for chart in charts for problem in chart.problems),
        ],
        charts=[(chart.kind, AXES[chart.axis], Markup(svg(chart, references))) for chart in drawn],
        chart_note=chart_note(comparison, charts[0]),
        provenance={record.name: _provenance(record) for record in table.records},
        made=made,
    )


def _rank(column: Column, table: RunsTable) -> tuple[int, int]:
    """Return the sort key of a column. The column that the table is sorted by comes first, then losses, then settings
    and the state, then the rest."""
    if column.title == table.sorted_by:
        return 0, -1
    if column.quantity in LOSSES:
        return 0, LOSSES.index(column.quantity)
    return (1, 0) if column.is_setting or column.key == "state" else (2, 0)


def _provenance(record: RunRecord) -> list[str]:
    """Return a line for each known fact about a run's training, and for each result, with its date."""
    named = {
        "folder": record.directory.path,
        "state": f"{record.state.word} {record.state.detail}".strip(),
        "machine": machine_of(record),
        "torch": record.recorded("torch"),
        "precision": record.recorded("precision"),
        "data": record.dataset.get("name"),
    }
    results = [f"{result.kind} of {result.weights.checkpoint}, {result.date}" for result in record.results.of(Result)]
    return [*(f"{key}: {value}" for key, value in named.items() if value), *results]
