"""Which run was better, how sure is that, and what did it cost?"""

from __future__ import annotations

from pathlib import Path

import click

from harness.common.errors import one_line_errors
from harness.common.options import Command


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
        from harness.analysis.table_fits import fit_lines
        from harness.analysis.table_text import table_lines

        records = read_records(runs_dir, runs)
        table = RunsTable.of(records).sorted(sort)
        for line in (*table_lines(table), *fit_lines(table)):
            click.echo(line)


if __name__ == "__main__":
    main()
