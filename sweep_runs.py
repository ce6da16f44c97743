"""Many runs from one file: make them, plan them, run them, or have them chosen one by one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import click

from harness.common.errors import one_line_errors
from harness.common.options import POSITIVE, RUNS_DIR, Group

SWEEP = click.argument("sweep", type=click.Path(path_type=Path), metavar="SWEEP.json")
DATASETS_DIR = click.argument("datasets_dir", type=click.Path(path_type=Path))
GROUPS = click.option(
    "--groups", type=click.IntRange(1, 64), default=1, show_default=True, help="So many runs at a time."
)
PROCESSES = click.option(
    "--processes", type=click.IntRange(1, 1024), help="Of each run. Default: a group's GPUs, or 1 without GPUs."
)
MAX_DOLLARS = click.option("--max-dollars", type=POSITIVE, help="Stop before all runs together have cost more.")
CLEAR_LINE = "\r\x1b[2K"
WHERE_THEY_PRINT = "What they print goes to sweep.log in their folders."


def print_schema(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """click's callback: print the JSON Schema, if it is asked for, and end."""
    if is_asked:
        from harness.sweeps.file import sweep_schema

        click.echo(json.dumps(sweep_schema(), indent=2))
        context.exit()


@click.group(cls=Group)
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_schema,
    help="Print the JSON Schema of a SWEEP.json, for editors.",
)
def main() -> None:
    """Derive many runs from one, and train them.

    \b
    A SWEEP.json:
        {"base": "quickstart-gpt2", "set": {"min_train_tokens": 400000},
         "vary": {"learning_rate": [0.0015, 0.003], "random_seed": [1, 2, 3]}}
    """


@main.command("make", short_help="Write the folders of all its runs.")
@SWEEP
@RUNS_DIR
def make(sweep: Path, runs_dir: Path) -> None:
    """Write a folder for each run of SWEEP.json beside its base: all, or none.

    Those that are there already are left as they are; a folder of the same name with another run in it is refused.
    """
    with one_line_errors():
        from harness.sweeps.derived_runs import write_runs
        from harness.sweeps.sweep import load_sweep

        found = load_sweep(sweep, runs_dir)
        missing = found.missing()
        found.check_startable(missing)
        write_runs(missing)
        there = len(found.runs) - len(missing)
        made = "1 run" if len(missing) == 1 else f"{len(missing):,} runs"
        click.echo(f"{made} made in {runs_dir}" + (f", {there:,} were there already" if there else ""))
        for run in missing:
            click.echo(f"  {run.name}")


@main.command("plan", short_help="Add up hours, dollars and disk.")
@SWEEP
@DATASETS_DIR
@GROUPS
@PROCESSES
@click.option("--assume-tps", type=POSITIVE, help="Tokens per second of training alone.")
@click.option("--assume-tps-with-validation", type=POSITIVE, help="Tokens per second, validation's time counted.")
@click.option("--assume-device", help="As if the processes' devices were such GPUs, like H100: an estimated speed.")
@RUNS_DIR
def plan(sweep: Path, datasets_dir: Path, runs_dir: Path, groups: int, **given: Any) -> None:
    """Print what is left of SWEEP.json's runs, and what it will take. Nothing is trained, nor need they be made."""
    with one_line_errors():
        from harness.sweeps.plan import AssumedSpeed, MachineUse, Planner, describe_sweep_plan, plan_sweep
        from harness.sweeps.sweep import load_sweep

        found = load_sweep(sweep, runs_dir)
        speed = AssumedSpeed(given["assume_tps"], given["assume_tps_with_validation"], given["assume_device"])
        use = MachineUse.of(datasets_dir, groups, given["processes"])
        click.echo(describe_sweep_plan(plan_sweep(found, Planner(use, speed.options(runs_dir))), runs_dir))


@main.command("run", short_help="Make its runs, and train what is not finished.")
@SWEEP
@DATASETS_DIR
@GROUPS
@PROCESSES
@MAX_DOLLARS
@RUNS_DIR
def run_(sweep: Path, datasets_dir: Path, runs_dir: Path, max_dollars: float | None, **given: Any) -> None:
    """Make the runs of SWEEP.json that are missing, and train what is not finished: one run after the other, or
    --groups at a time.

    The same command goes on after whatever has ended it. A run that fails does not stop the others. Ctrl-C stops them
    with checkpoints. What a run prints goes to sweep.log in its folder.
    """
    with one_line_errors():
        from harness.common.exit import survive_closed_output
        from harness.common.lock import RunLock
        from harness.sweeps.derived_runs import write_runs
        from harness.sweeps.plan import AssumedSpeed, MachineUse, Planner, plan_sweep
        from harness.sweeps.run import SweepRunner, leave
        from harness.sweeps.sweep import load_sweep, next_commands

        found = load_sweep(sweep, runs_dir)
        missing = found.missing()
        found.check_startable(missing)
        RunLock.take(runs_dir / f".sweep-{found.name}.lock", f"used for the sweep {found.name}")
        use = MachineUse.of(datasets_dir, given["groups"], given["processes"])
        planner = Planner(use, AssumedSpeed().options(runs_dir))
        runner = SweepRunner(found.runs, planner, Path(__file__).with_name("ddp_train.py"), max_dollars)
        plan_sweep(found, planner).check_disk(runs_dir)
        write_runs(missing)
        survive_closed_output(runner.hang_up)
        say(f"Sweep {found.name}: {len(runner.waiting):,} of {len(found.runs):,} runs are to be trained")
        if runner.is_work_left():
            say(WHERE_THEY_PRINT)
        leave(runner.run(say, progress_line()), found.runs)
        say(next_commands(found, datasets_dir))


@main.command("search", short_help="Choose and train runs, one after the other.")
@SWEEP
@DATASETS_DIR
@click.option("--trials", type=click.IntRange(1, 1000), help="So many in all. Default: the file's.")
@click.option("--no-pruning", is_flag=True, help="Train every trial to its end.")
@GROUPS
@PROCESSES
@MAX_DOLLARS
@RUNS_DIR
def search(sweep: Path, datasets_dir: Path, runs_dir: Path, max_dollars: float | None, **given: Any) -> None:
    """Make and train the trials of a SWEEP.json with "search": Optuna chooses each by what the earlier ones came to.

    \b
        {"base": "quickstart-gpt2", "trials": 20,
         "search": {"learning_rate": {"min": 0.0003, "max": 0.01, "log": true},
                    "lr_schedule": ["cosine", "wsd"]}}

    A trial that does worse than half of the finished ones did is ended early. The same command goes on after whatever
    has ended it. Needs the extra `sweep`: uv run --extra sweep sweep_runs.py search ...
    """
    with one_line_errors():
        from harness.common.exit import survive_closed_output
        from harness.common.lock import RunLock
        from harness.sweeps.plan import AssumedSpeed, MachineUse, Planner
        from harness.sweeps.run import leave
        from harness.sweeps.search import SearchLimits, SearchRunner
        from harness.sweeps.study import check_installed
        from harness.sweeps.trials import describe_best, load_search

        found = load_search(sweep, runs_dir, given["trials"])
        check_installed()
        RunLock.take(runs_dir / f".sweep-{found.name}.lock", f"used for the sweep {found.name}")
        use = MachineUse.of(datasets_dir, given["groups"], given["processes"])
        planner = Planner(use, AssumedSpeed().options(runs_dir))
        limits = SearchLimits(max_dollars, prunes=not given["no_pruning"])
        runner = SearchRunner(found, planner, Path(__file__).with_name("ddp_train.py"), limits)
        survive_closed_output(runner.hang_up)
        say(f"Search {found.name}: {found.count:,} trials, {runner.describe_start()}")
        if runner.is_work_left():
            say(WHERE_THEY_PRINT)
        ends = runner.run(say, progress_line())
        for line in describe_best(found, runner.results()):
            say(line)
        leave(ends, runner.runs, runner.unmade)


def say(text: str) -> None:
    """Print a line, on a terminal in place of one that was shown."""
    print(f"{CLEAR_LINE}{text}" if sys.stdout.isatty() else text, flush=True)


def progress_line() -> Callable[[str], None] | None:
    """Return a function that shows a line in place of the terminal's last; None where output is no terminal."""
    if not sys.stdout.isatty():
        return None
    return lambda text: print(f"{CLEAR_LINE}{text[: get_terminal_size().columns - 1]}", end="", flush=True)


@main.command("status", short_help="What is finished, going on, failed.")
@SWEEP
@RUNS_DIR
def status(sweep: Path, runs_dir: Path) -> None:
    """Print how far each run of SWEEP.json is; of a search, the best first."""
    with one_line_errors():
        from harness.sweeps.file import read_sweep
        from harness.sweeps.standing import describe_standings, standing_of
        from harness.sweeps.sweep import load_sweep
        from harness.sweeps.trials import describe_search, load_search

        if read_sweep(sweep).is_search:
            click.echo(describe_search(load_search(sweep, runs_dir)))
            return
        found = load_sweep(sweep, runs_dir)
        click.echo(describe_standings(found.name, [standing_of(run) for run in found.runs], runs_dir))


if __name__ == "__main__":
    main()
