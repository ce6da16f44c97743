"""`--schema`: the JSON Schema of a run's two files, for editors. Loads nothing before it is asked."""

from __future__ import annotations

import json

import click


def print_schema(context: click.Context, _: click.Parameter, kind: str | None) -> None:
    """click's callback: print the schema of "train" or "model", if one is asked for, and end."""
    if kind is None:
        return
    from harness.common.json_files import json_schema
    from harness.model.config import ModelConfig
    from harness.runs.train_config import TrainConfig

    click.echo(json.dumps(json_schema(TrainConfig if kind == "train" else ModelConfig), indent=2))
    context.exit()


schema_option = click.option(
    "--schema",
    type=click.Choice(["train", "model"]),
    is_eager=True,
    expose_value=False,
    callback=print_schema,
    help="Print the JSON Schema of train.json or model.json, for editors.",
)
