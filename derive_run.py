"""Derive a run from another run: copy model.json and train.json with some keys changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from harness.common.errors import UserError
from harness.common.messages import quoted
from harness.common.options import RUNS_DIR, Command


def parse_settings(texts: tuple[str, ...]) -> dict[str, Any]:
    """Parse the KEY=VALUE texts of --set. A value that is not valid JSON is a string. Raises UserError if a text is
    wrong."""
    from harness.common.json_files import strict_json

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
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key of model.json or train.json; can be given several times.",
)
@RUNS_DIR
@click.option(
    "--datasets-dir",
    type=click.Path(path_type=Path),
    default=Path("datasets"),
    show_default=True,
    help="DATASETS_DIR, the folder of all datasets.",
)
def main(base: str, new: str, settings: tuple[str, ...], runs_dir: Path, datasets_dir: Path) -> None:
    """Create the run NEW as a copy of BASE with some keys changed. The key on_end is not copied.

    VALUE is parsed as JSON if it is valid JSON; otherwise it is text. null removes the key. The file derived.json in
    NEW records BASE and the keys that differ, except on_end and notify. To derive several runs at once, use
    sweep_runs.py.

    \b
    If --set dataset names datasets in DATASETS_DIR, NEW is fitted to them:
    - vocabulary size: theirs; BASE's if theirs is unknown or up to 127 smaller
    - validation: on no more sequences than their validation splits have, with
      a smaller microbatch_size if needed; none if a dataset has no such split
    - training: if the train splits are too short, on all that they have (in as
      many passes as "epochs" allows); a long warm-up is then shortened

    Keys given by --set are not changed.

    \b
        uv run derive_run.py quickstart mine --set dataset=me/my-texts
        uv run derive_run.py quickstart-gpt2 faster --set learning_rate=0.003
    """
    from harness.common.files import check_name
    from harness.data.dataset import did_you_mean, is_present
    from harness.data.fetch import check_obtainable
    from harness.sweeps.derived_runs import derive_for_dataset, load_base, write_runs

    folder = runs_dir / check_name(new, "run")
    changes = parse_settings(settings)
    parent = load_base(runs_dir, base)
    if folder.exists():
        raise UserError(f"{folder}: exists already; choose another name, or move it away")
    run = derive_for_dataset(parent, new, changes, datasets_dir)
    run.check_startable()
    datasets = run.train_config.dataset_weights if "dataset" in changes else ()
    for dataset in datasets:
        check_obtainable(datasets_dir, dataset, [], ask_hub=False)
    write_runs([run])
    with_what = "with" if run.differs else "without changes; --set KEY=VALUE changes a key"
    click.echo(f"{folder}: {parent.name} {with_what}")
    for key, values in run.differs.items():
        click.echo(f"  {key}: {json.dumps(values['base'])} -> {json.dumps(values['here'])}")
    for dataset in datasets:
        if not is_present(datasets_dir, dataset, []):
            how = "makes it" if dataset.startswith("builtin/") else "will look for it on the Hugging Face Hub"
            absent = f", so {new} is not adapted to it; training {how}"
            click.echo(f'note: "{dataset}" is not in {datasets_dir}{did_you_mean(datasets_dir, dataset) or absent}')


if __name__ == "__main__":
    main()
