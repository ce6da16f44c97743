"""Comparison of runs: which one was better, how certain that is, and what each one cost."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import click

from harness.common.errors import UserError
from harness.common.options import RUNS_DIR, Command

PATH = click.Path(path_type=Path)
LARGEST_LOSS = 1000.0  # nats per token; a --reference must be below it
AXIS = click.Choice(["tokens", "steps", "hours", "dollars", "flops"])


@click.command(cls=Command)
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@RUNS_DIR
@click.option(
    "--baseline",
    metavar="RUN|ARM",
    help="Test whether the other arms are better or worse than this arm or the arm of this run (an arm is a group of "
    "runs that differ only in their seeds).",
)
@click.option(
    "--sort",
    metavar="KEY",
    help='Sort by KEY: a column\'s key in the output of --json, or "name". Default: best loss first.',
)
@click.option("--machines", is_flag=True, help="Estimate time and cost of each RUN on other machines.")
@click.option("--prices", type=PATH, help="With --machines: your price list, like harness/planning/machines.json.")
@click.option("--html", type=PATH, help="Write table, curves and verdicts into one self-contained HTML file.")
@click.option("--chart", type=PATH, help="Draw the losses of the runs into this PNG.")
@click.option("--over", type=AXIS, show_default="tokens", help="X axis of the chart.")
@click.option(
    "--reference",
    multiple=True,
    metavar="LABEL=LOSS",
    help="Draw a line at this loss (nats per token) into the charts; can be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print table and verdicts as JSON.")
def main(
    runs: tuple[str, ...],
    runs_dir: Path,
    baseline: str | None,
    sort: str | None,
    machines: bool,
    prices: Path | None,
    html: Path | None,
    chart: Path | None,
    over: str | None,
    reference: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare RUNs: names of folders in --runs-dir, patterns like 'lr-*', or paths. Without a RUN, compare all runs
    that were ever trained, or all runs if none was.

    Prints a table with a row for each run: results, speed, time and cost. Below the table are the settings that differ.
    Numbers share a column only if they were measured on the same text or task.
    """
    from harness.common.files import check_writable, replace_text
    from harness.common.messages import abbreviated, paragraph
    from harness.comparison.against_baseline import compare_with
    from harness.comparison.charts import chart_note, charts_of, write_png
    from harness.comparison.fits import fits
    from harness.comparison.machines import machine_lines
    from harness.comparison.records import RunRecord, find_runs
    from harness.comparison.table import RunsTable, table_json, table_lines
    from harness.planning.machines import PRICES

    if prices is not None and not machines:
        raise UserError("--prices belongs with --machines")
    if machines and as_json:
        raise UserError("--machines and --json: give one of them")
    if machines and not runs:
        raise UserError("--machines: name the runs to estimate; speeds are taken from all runs in --runs-dir")
    if over and chart is None:
        raise UserError("--over belongs with --chart")
    if reference and not (html or chart):
        raise UserError("--reference belongs with --html or --chart")
    if chart is not None and chart.suffix.lower() != ".png":
        raise UserError(f"--chart {chart}: must end in .png")
    for path in filter(None, [chart, html]):
        check_writable(path.absolute().parent)
        if path.is_dir():
            raise UserError(f"{path}: is a folder; name a file")
    if html and chart and html.resolve() == chart.resolve():
        raise UserError(f"--html and --chart: both name {html}; give each its own file")
    references = _read_references(reference)
    arm = () if baseline is None else _runs_of_arm(runs_dir, baseline, runs)
    baseline = arm[0] if arm else None
    records = [RunRecord.read(run) for run in find_runs(runs_dir, (*runs, *arm) if runs else ())]
    # Runs that ship with the repository and were never trained here would fill the table.
    never = [record for record in records if record.state.word == "never trained"]
    left_out = [] if runs or len(never) == len(records) else [each for each in never if each.name != baseline]
    table = RunsTable.of([record for record in records if record not in left_out]).sorted(sort)
    everything = [*table.records, *left_out]
    comparison = compare_with(baseline, everything) if baseline is not None else None

    if as_json:
        verdicts = comparison.as_json() if comparison else None
        click.echo(json.dumps(table_json(table) | {"comparison": verdicts}, indent=2, allow_nan=False))
    else:
        texts = [*fits(table), *(["", *comparison.lines()] if comparison else [])]
        click.echo("\n".join([*table_lines(table), *(line for text in texts for line in paragraph(text) or [""])]))
    for run in find_runs(runs_dir, runs) if machines else []:
        click.echo("\n".join(["", *machine_lines(run, find_runs(runs_dir, ()), prices or PRICES)]))
    if left_out:
        names = abbreviated([record.name for record in left_out])
        line = f"never trained, and not shown unless they are named: {names}"
        click.echo("\n".join(paragraph(line)), err=as_json)
    if html is not None:
        from harness.comparison.page import render

        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        made = f"Made {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())} by: uv run {command}"
        replace_text(html, render(table, comparison, references, baseline, made))
        click.echo(f"Wrote {html}", err=True)
    if chart is not None:
        [drawn] = charts_of(everything, [over or "tokens"], baseline)
        if not drawn.curves:
            problems = abbreviated(drawn.problems, most=3, separator="; ")
            raise UserError(f"--chart: nothing to draw: {problems}")
        write_png(drawn, chart, references, chart_note(comparison, drawn))
        for problem in drawn.problems:
            click.echo("\n".join(paragraph(f"not drawn: {problem}")), err=True)
        click.echo(f"Drew {chart}", err=True)


def _runs_of_arm(runs_dir: Path, baseline: str, compared: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the runs that `baseline`, a run or an arm, selects. Raises UserError if it is neither.

    - A run in `compared` (empty: all runs) selects itself.
    - Any other run selects all runs of its arm, itself first.
    - An arm selects its runs in `compared`, or all its runs if `compared` has none of them.
    """
    from harness.comparison.arms import find_arms
    from harness.comparison.records import RunRecord, find_runs
    from harness.runs.directory import RunDirectory

    try:
        name = RunDirectory.find(runs_dir, baseline).path.name
        if name in {run.path.name for run in find_runs(runs_dir, compared)}:
            return (name,)
        arms = find_arms([RunRecord.read(run) for run in find_runs(runs_dir, ())], name)
        own = arms.arm_with(name) or ""
        return tuple(dict.fromkeys((name, *arms.members(own))))
    except UserError:
        for names in (compared, ()):
            arms = find_arms([RunRecord.read(run) for run in find_runs(runs_dir, names)])
            if baseline in arms.run_names:
                return arms.members(baseline)
        raise


def _read_references(reference: tuple[str, ...]) -> dict[str, float]:
    """Return the losses in the LABEL=LOSS texts of --reference, by label. Raises UserError if a text is wrong."""
    found = {}
    for text in reference:
        label, _, number = map(str.strip, text.rpartition("="))
        try:
            loss = float(number)
        except ValueError:
            loss = 0.0
        if not label or not 0 < loss < LARGEST_LOSS:
            form = 'must be LABEL=LOSS, such as "GPT-2 small=3.500"'
            raise UserError(f'--reference "{text}": {form}, with a loss above 0 and below {LARGEST_LOSS:g}')
        if label in found:
            raise UserError(f'--reference "{text}": a second line called "{label}"; give each its own label')
        found[label] = loss
    return found


if __name__ == "__main__":
    main()
