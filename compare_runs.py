"""Comparison of runs: which one was better, how sure that is, and what each cost."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.common.errors import one_line_errors
from harness.common.options import Command

if TYPE_CHECKING:
    from harness.comparison.against_baseline import BaselineComparison
    from harness.comparison.compare_options import ChosenRuns, CompareOptions
    from harness.comparison.records import RunRecord
    from harness.comparison.runs_table import RunsTable

PATH = click.Path(path_type=Path)


@click.command(cls=Command)
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--runs-dir", type=PATH, default=Path("runs"), show_default=True)
@click.option("--baseline", metavar="RUN", help="Or its arm: is any other run better, and how sure is that?")
@click.option("--sort", metavar="KEY", help="A column, as --json names it, or name. Default: the best loss first.")
@click.option("--machines", is_flag=True, help="What each RUN would take and cost on other machines.")
@click.option("--prices", type=PATH, help="With --machines: your list of them, like harness/planning/machines.json.")
@click.option("--html", type=PATH, help="Write a page to look at and to send: table, curves, verdicts, in one file.")
@click.option("--chart", type=PATH, help="Draw the losses of the runs into this PNG.")
@click.option("--over", default="tokens", show_default=True, help="What the chart draws them over: steps, hours, ...")
@click.option("--reference", multiple=True, metavar="LABEL=LOSS", help="A line across the chart and the page's.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
def main(runs: tuple[str, ...], **options: Any) -> None:
    """Compare RUNs, names of folders in --runs-dir, patterns like 'lr-*', or paths; without one, all that were trained.

    A table with a row for each: what was asked of it as far as it differs, what came out, and what it cost. Unlike
    things never stand in one column.
    """
    with one_line_errors():
        from harness.comparison.compare_options import CompareOptions
        from harness.comparison.runs_table import RunsTable

        asked = CompareOptions(**options)
        asked.check(runs)
        chosen = asked.choose_runs(runs)
        asked = chosen.asked
        table = RunsTable.of(chosen.records).sorted(asked.sort)
        comparison = _compare(table, chosen)
        for line in _json_lines(table, comparison) if asked.as_json else _lines(table, comparison):
            click.echo(line)
        if asked.machines:
            for line in _elsewhere(runs, asked):
                click.echo(line)
        for line in _left_out(chosen):
            click.echo(line, err=asked.as_json)
        if asked.html is not None:
            _write_page(asked.html, table, comparison, asked)
        if asked.chart is not None:
            _draw_chart(asked.chart, [*table.records, *chosen.left_out], comparison, asked)


def _compare(table: RunsTable, chosen: ChosenRuns) -> BaselineComparison | None:
    from harness.comparison.against_baseline import compare_with

    baseline = chosen.asked.baseline_name()
    return None if baseline is None else compare_with(baseline, [*table.records, *chosen.left_out])


def _left_out(chosen: ChosenRuns) -> Iterator[str]:
    from harness.common.messages import abbreviated
    from harness.comparison.table_text import paragraph

    if chosen.left_out:
        names = abbreviated([record.name for record in chosen.left_out])
        yield from paragraph(f"never trained, and not shown unless they are named: {names}")


def _lines(table: RunsTable, comparison: BaselineComparison | None) -> Iterator[str]:
    """The table, the curves that it holds, and the verdicts."""
    from harness.comparison.table_fits import fit_lines
    from harness.comparison.table_text import paragraph, table_lines

    yield from table_lines(table)
    yield from fit_lines(table)
    if comparison is not None:
        yield ""
        for text in comparison.lines():
            yield from paragraph(text)


def _json_lines(table: RunsTable, comparison: BaselineComparison | None) -> Iterator[str]:
    from harness.comparison.table_json import table_json

    yield json.dumps(table_json(table, comparison), indent=2, ensure_ascii=False, allow_nan=False)


def _elsewhere(runs: tuple[str, ...], asked: CompareOptions) -> Iterator[str]:
    """The runs on other machines, by the speeds of all runs in the folder."""
    from harness.comparison.machines_table import elsewhere
    from harness.comparison.records import find_runs
    from harness.planning.machines import PRICES

    others = find_runs(asked.runs_dir, ())
    for run in find_runs(asked.runs_dir, runs):
        yield ""
        yield from elsewhere(run, others, asked.prices or PRICES)


def _write_page(path: Path, table: RunsTable, comparison: BaselineComparison | None, asked: CompareOptions) -> None:
    from harness.comparison.comparison_report import report_of
    from harness.comparison.html_report import write_report

    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    made = f"Made {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())} by: uv run {command}"
    write_report(path, report_of(table, comparison, asked.read_references(), asked.baseline_name(), made))
    click.echo(f"Wrote {path}", err=True)


def _draw_chart(
    path: Path, records: Sequence[RunRecord], comparison: BaselineComparison | None, asked: CompareOptions
) -> None:
    """Raises UserError if nothing can be drawn."""
    from harness.common.errors import UserError
    from harness.common.messages import abbreviated
    from harness.comparison.comparison_report import chart_note, comparable_curves
    from harness.comparison.curves import choose_axis
    from harness.comparison.table_text import paragraph

    axis = choose_axis(asked.over)
    comparable = comparable_curves(records, asked.baseline_name())
    curves, problems = comparable.over(axis)
    if not curves:
        raise UserError(f"--chart: nothing to draw: {abbreviated(problems, most=3, separator='; ')}")
    from harness.comparison.charts import draw_curves

    draw_curves(curves, axis, path, asked.read_references(), chart_note(comparison, comparable.kind))
    for problem in problems:
        for line in paragraph(f"not drawn: {problem}"):
            click.echo(line, err=True)
    click.echo(f"Drew {path}", err=True)


if __name__ == "__main__":
    main()
