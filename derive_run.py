"""Derive a run from another one: the same two files with some keys changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from harness.common.errors import UserError, one_line_errors
from harness.common.json_files import strict_json
from harness.common.messages import quoted
from harness.common.options import RUNS_DIR, Command


def parse_settings(texts: tuple[str, ...]) -> dict[str, Any]:
    """KEY=VALUE of the command line, several times: a value is JSON, or else a string. Raises UserError."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise UserError(f"--set {quoted(text)}: must be KEY=VALUE, such as learning_rate=0.001")
        if key in settings:
            raise UserError(f"--set {key}: given twice; keep one")
        try:
            settings[key] = strict_json(value)
        except (ValueError, RecursionError):
            settings[key] = value
    return settings


@click.command(cls=Command)
@click.argument("base")
@click.argument("new")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A key of model.json or train.json.")
@RUNS_DIR
@click.option(
    "--datasets-dir", type=click.Path(path_type=Path), default=Path("datasets"), show_default=True, help="DATASETS_DIR"
)
def main(base: str, new: str, settings: tuple[str, ...], runs_dir: Path, datasets_dir: Path) -> None:
    """Make the run NEW like BASE, with some keys changed.

    VALUE is JSON, or else text; null leaves the key out. NEW gets a derived.json that names BASE and what differs.
    With another dataset that is in DATASETS_DIR, the vocabulary becomes that one's, and tokens and validation batches
    at most what it has. Several runs at once are a sweep: sweep_runs.py.

    \b
        uv run derive_run.py quickstart mine --set dataset=me/my-texts
        uv run derive_run.py quickstart-gpt2 faster --set learning_rate=0.003
    """
    with one_line_errors():
        from harness.common.files import check_name
        from harness.data.dataset import neighbour_remark
        from harness.sweeps.derived_runs import Base, derive_for_dataset, write_runs

        folder = runs_dir / check_name(new, "run")
        changes = parse_settings(settings)
        parent = Base.load(runs_dir, base)
        if folder.exists():
            raise UserError(f"{folder}: is there already; choose another name, or move it away")
        run = derive_for_dataset(parent, new, changes, datasets_dir)
        run.check_startable()
        write_runs([run])
        with_what = "with" if run.derivation.differs else "without a difference; --set KEY=VALUE makes one"
        click.echo(f"{folder}: {parent.run.path.name} {with_what}")
        for key, difference in run.derivation.differs.items():
            click.echo(f"  {key}: {json.dumps(difference.base)} -> {json.dumps(difference.here)}")
        if remark := neighbour_remark(datasets_dir, run.train_config.dataset):
            click.echo(f"note: {remark}")


if __name__ == "__main__":
    main()
