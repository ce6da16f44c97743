"""Derive many runs from one sweep file, plan them, and train them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from harness.common.errors import UserError
from harness.common.messages import counted
from harness.common.options import POSITIVE, RUNS_DIR, SPEED, Group

SWEEP = click.argument("sweep", type=click.Path(path_type=Path), metavar="SWEEP.json")
DATASETS_DIR = click.argument("datasets_dir", type=click.Path(path_type=Path))
GROUPS = click.option(
    "--groups", type=click.IntRange(1, 64), default=1, show_default=True, help="Number of runs to train at a time."
)
PROCESSES = click.option(
    "--processes",
    type=click.IntRange(1, 1024),
    help="Processes of each run. Default: the number of GPUs divided by --groups, or 1 without GPUs.",
)
TRAIN = Path(__file__).with_name("ddp_train.py")


@click.group(cls=Group)
def main() -> None:
    """Derive many runs from one, and train them.

    \b
    A SWEEP.json:
        {"base": "quickstart-gpt2", "set": {"min_train_tokens": 400000},
         "vary": {"learning_rate": [0.0015, 0.003], "random_seed": [1, 2, 3]}}
    """


@main.command("make", short_help="Write the folders of all runs.")
@SWEEP
@RUNS_DIR
def make(sweep: Path, runs_dir: Path) -> None:
    """Write a folder for each run of SWEEP.json, beside the folder of the base run. If one folder cannot be written,
    none is written.

    Runs that exist already are not changed. It is an error if one of the folders holds another run.
    """
    from harness.sweeps.derived_runs import write_runs
    from harness.sweeps.file import load_sweep

    found = load_sweep(sweep, runs_dir)
    missing = found.missing()
    write_runs(missing)
    there = len(found.runs) - len(missing)
    already = f", {there:,} {'was' if there == 1 else 'were'} there already" if there else ""
    click.echo(f"{counted(len(missing), 'run')} made in {runs_dir}{already}")
    for line in [*(f"  {run.name}" for run in missing), *found.overruled()]:
        click.echo(line)


@main.command("plan", short_help="Estimate hours, dollars and disk space.")
@SWEEP
@DATASETS_DIR
@GROUPS
@PROCESSES
@click.option("--assume-tps", type=SPEED, help="Tokens per second, not counting the time of validation.")
@click.option(
    "--assume-tps-with-validation", type=SPEED, help="Tokens per second, counting the time of validation, too."
)
@click.option("--assume-device", help="Estimate the speed as if each process had this GPU, e.g. H100.")
@RUNS_DIR
def plan(sweep: Path, datasets_dir: Path, runs_dir: Path, **machine: Any) -> None:
    """Print which runs of SWEEP.json are left to train, and their time, cost and disk space. Nothing is trained. The
    run folders need not exist yet."""
    from harness.sweeps.file import load_sweep
    from harness.sweeps.plan import Planner, describe_sweep_plan, plan_sweep

    planner = Planner(datasets_dir, **machine)
    click.echo(describe_sweep_plan(plan_sweep(load_sweep(sweep, runs_dir), planner), runs_dir))


@main.command("run", short_help="Make missing runs, and train unfinished ones.")
@SWEEP
@DATASETS_DIR
@GROUPS
@PROCESSES
@click.option(
    "--max-dollars",
    type=POSITIVE,
    help="Start no run that would take the cost of all runs together above this, and stop the runs once this is spent. "
    " [default: SWEEP.json's max_dollars]",
)
@click.option(
    "--max-hours",
    type=POSITIVE,
    help="Stop once the sweep has trained for this many hours, earlier attempts included.  [default: SWEEP.json's "
    "max_hours]",
)
@RUNS_DIR
def run_(
    sweep: Path,
    datasets_dir: Path,
    runs_dir: Path,
    max_dollars: float | None,
    max_hours: float | None,
    **machine: Any,
) -> None:
    """Make the missing runs of SWEEP.json. Then train its runs one after the other, or --groups at a time. Finished,
    diverged and damaged runs are left out. The sweep does not begin if a folder holds another run, or if a model.json
    or train.json is damaged.

    If the sweep ends early, run the same command again to resume it, with a higher limit if one has been reached. A run
    that fails does not stop the others. Ctrl-C stops all runs, each with a checkpoint if its training has begun. The
    output of a run is written to sweep.log in its folder.
    """
    from harness.common.errors import survive_closed_output
    from harness.common.lock import RunLock
    from harness.sweeps.derived_runs import write_runs
    from harness.sweeps.file import load_sweep
    from harness.sweeps.plan import Planner, plan_sweep
    from harness.sweeps.run import SweepRunner, say

    found = load_sweep(sweep, runs_dir)
    missing = found.missing()
    RunLock.take(runs_dir / f".sweep-{found.name}.lock", f"used for the sweep {found.name}")
    planner = Planner(datasets_dir, **machine)
    limits = max_dollars or found.max_dollars, max_hours or found.max_hours
    runner = SweepRunner(found.runs, planner, TRAIN, *limits)
    if shortage := plan_sweep(found, planner).disk_shortage(runs_dir):
        raise UserError(f"{runs_dir}: {shortage}")
    write_runs(missing)
    for line in found.overruled():
        say(line)
    say(f"Sweep {found.name}: {len(runner.waiting):,} of {len(found.runs):,} runs are to be trained")
    survive_closed_output(runner.hang_up)
    if runner.waiting:
        say("The output of each run is written to sweep.log in its folder.")
    runner.run()
    runner.report_end()
    names = [run.name for run in found.runs]
    pattern = f"{found.name}-*"
    if {path.name for path in runs_dir.glob(pattern)} == {*names}:
        names = [shlex.quote(pattern)]
    place = "" if runs_dir == Path("runs") else f" --runs-dir {shlex.quote(str(runs_dir))}"
    say(f"\nNext:\n  uv run test_loss.py {shlex.quote(str(datasets_dir))} {' '.join(names)}{place}")
    say(f"  uv run compare_runs.py {' '.join(names)} --baseline {found.runs[0].name}{place}")


@main.command("status", short_help="Print the state of each run.")
@SWEEP
@RUNS_DIR
def status(sweep: Path, runs_dir: Path) -> None:
    """Print the state and the progress of each run of SWEEP.json."""
    from harness.sweeps.file import load_sweep
    from harness.sweeps.plan import count_states, status_lines, status_of

    found = load_sweep(sweep, runs_dir)
    statuses = [status_of(run) for run in found.runs]
    click.echo(f"Sweep {found.name} in {runs_dir}: {count_states(statuses)}\n")
    click.echo("\n".join(status_lines(statuses)))


if __name__ == "__main__":
    main()
