"""List the runs in a mirror, fetch one, follow one that trains elsewhere, or send one there.

docs/mirror.md says what a mirror is.
"""

from __future__ import annotations

from pathlib import Path

import click

from harness.common.files import check_name
from harness.common.options import RUNS_DIR, Group

URL = click.argument("url")


@click.group(cls=Group)
def main() -> None:
    """List, fetch or follow the runs in a mirror, or send a run there. A mirror (docs/mirror.md) has a copy of each run
    at URL/RUN.

    \b
        uv run mirror.py list hf://buckets/me/runs
        uv run mirror.py fetch hf://buckets/me/runs my-run --without-weights
        uv run mirror.py follow hf://buckets/me/runs my-run
        uv run mirror.py push my-run hf://buckets/me/runs
    """


@main.command("list", short_help="Print the runs at URL.")
@URL
def list_runs(url: str) -> None:
    """Print a line for each run at URL: its name, its newest whole checkpoint, the size of all its files in GB, and the
    machine that trains it, or that was killed while training it."""
    from harness.mirror.home import describe_runs

    for line in describe_runs(url):
        print(line)


@main.command(short_help="Bring a run to this machine.")
@URL
@click.argument("run")
@click.option("--without-weights", is_flag=True, help="Fetch no checkpoint. Finished runs can be compared without one.")
@RUNS_DIR
def fetch(url: str, run: str, without_weights: bool, runs_dir: Path) -> None:
    """Bring RUN from URL to this machine: its settings, metrics, results, newest and best checkpoint.

    Checkpoints are fetched only if the newest one at URL is newer than `latest` here, or replaces a damaged `latest`.
    The newest one then becomes `latest`. Checkpoints at URL that the run has abandoned here, by going back or by
    --restart, are ignored.

    Settings and results that are here already are not replaced.

    \b
    Summary, chart and metrics at URL replace those here if they are whole and
    fit the checkpoints here. Those here are kept
    - if the run is being trained here
    - if it has a newer checkpoint here than at URL
    - if the run here has abandoned the newest checkpoint at URL
    """
    from harness.mirror.home import fetch_run

    print(f"{fetch_run(url, check_name(run, 'run'), runs_dir, with_weights=not without_weights)}: fetched")


@main.command(short_help="Print losses as they arrive.")
@URL
@click.argument("run")
def follow(url: str, run: str) -> None:
    """Print the losses of RUN as they arrive at URL, until no machine trains the run, or until its machine has not
    been heard from for five minutes."""
    from harness.mirror.home import follow_run

    for line in follow_run(url, check_name(run, "run")):
        print(line, flush=True)


@main.command(short_help="Send a run to URL.")
@click.argument("run")
@URL
@RUNS_DIR
@click.option("--take-over", is_flag=True, help="Send it even if another machine trains the run.")
def push(run: str, url: str, runs_dir: Path, take_over: bool) -> None:
    """Send RUN to URL: the newest and the best checkpoint, metrics, results and settings.

    If the run has gone back to an earlier step here, the later checkpoints at URL are set aside: their meta.json
    becomes meta-aside.json, so that no machine continues from them. Summary and chart at URL are then replaced or
    deleted.
    """
    from harness.mirror.home import push_run
    from harness.runs.directory import RunDirectory

    print(f"{push_run(RunDirectory.find(runs_dir, run), url, take_over=take_over)}: complete")


if __name__ == "__main__":
    main()
