"""Which run was better, how sure is that, and what did it cost?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.common.errors import one_line_errors
from harness.common.options import Command
from harness.runs.directory import RunDirectory

if TYPE_CHECKING:
    from harness.analysis.against_baseline import BaselineComparison
    from harness.analysis.runs_table import RunsTable


@click.command(cls=Command)
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--baseline", metavar="RUN", help="Say of every other run whether it is better, and how sure that is.")
@click.option("--sort", metavar="KEY", help="A column, as --json names it, or name. Default: the best loss first.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
def main(runs: tuple[str, ...], runs_dir: Path, baseline: str | None, sort: str | None, as_json: bool) -> None:
    """Compare RUNs, names of folders in --runs-dir or their paths; all of them if none is named.

    A table with a row for each: what was asked of it as far as it differs, what came out, and what it cost. Unlike
    things never stand in one column.
    """
    with one_line_errors():
        from harness.analysis.records import read_records
        from harness.analysis.runs_table import RunsTable

        records = read_records(runs_dir, (*runs, baseline) if runs and baseline else runs)
        table = RunsTable.of(records).sorted(sort)
        comparison = None
        if baseline is not None:
            from harness.analysis.against_baseline import compare_with

            comparison = compare_with(RunDirectory.find(runs_dir, baseline).path.name, table.records)
        for line in _json_lines(table, comparison) if as_json else _lines(table, comparison):
            click.echo(line)


def _lines(table: RunsTable, comparison: BaselineComparison | None) -> Iterator[str]:
    """The table, the curves that it holds, and the verdicts."""
    from harness.analysis.table_fits import fit_lines
    from harness.analysis.table_text import paragraph, table_lines

    yield from table_lines(table)
    yield from fit_lines(table)
    if comparison is not None:
        yield ""
        for text in comparison.lines():
            yield from paragraph(text)


def _json_lines(table: RunsTable, comparison: BaselineComparison | None) -> Iterator[str]:
    from harness.analysis.table_json import table_json

    yield json.dumps(table_json(table, comparison), indent=2, ensure_ascii=False, allow_nan=False)


if __name__ == "__main__":
    main()
