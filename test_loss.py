"""Test models: print their losses on a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.common.errors import UserError
from harness.common.libraries import configure_libraries
from harness.common.options import RUNS_DIR, Command


@click.command(cls=Command)
@click.argument("datasets_dir", type=click.Path(path_type=Path))
@click.argument("models", nargs=-1, metavar="[RUN[:CHECKPOINT] | MODEL_JSON WEIGHTS]...")
@click.option(
    "--run",
    "runs",
    multiple=True,
    metavar="RUN[:CHECKPOINT]",
    help="Like the argument RUN[:CHECKPOINT]; can be given several times.",
)
@RUNS_DIR
@click.option(
    "--dataset",
    help="owner/name or builtin/name. Default: what the model was trained on; if that is not known, and the tokenizer "
    "is GPT-2's, gpjt/fineweb-gpt2-tokens.",
)
@click.option(
    "--split", type=click.Choice(["test", "validation"]), help="Default: test if the dataset has it, else validation."
)
@click.option(
    "--start-token",
    type=click.IntRange(min=0),
    help="First token to measure on. Default: 0, or 50,000,000 if a validation split has a batch after that token.",
)
@click.option(
    "--batches",
    type=click.IntRange(min=1),
    help="Number of batches. Default: all, but at most 3,200 of a validation split that has a batch after token "
    "50,000,000.",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=6, show_default=True, help="Sequences per batch.")
@click.option("--precision", type=click.Choice(["auto", "bf16", "fp16", "fp32"]), default="auto", show_default=True)
def main(
    datasets_dir: Path,
    models: tuple[str, ...],
    runs: tuple[str, ...],
    runs_dir: Path,
    precision: str,
    **options: Any,
) -> None:
    """Print the mean loss of models on a dataset in DATASETS_DIR, or on each dataset of the mixture that a model was
    trained on. RUN names a run's best checkpoint (its latest if it has no best; for an imported run, its weights). A
    pattern like 'lr-*' names all runs that match. RUN:CHECKPOINT names any checkpoint (a folder's name, `latest` or
    `best`). MODEL_JSON WEIGHTS are the two files of a model.

    A dataset that DATASETS_DIR lacks is downloaded or built. For several models, losses on the same text are printed as
    a table, lowest first. Results of a run's checkpoints are also written to the folder results/ of the run.
    """
    configure_libraries()
    from harness.runs.trained_model import each_once, find_models

    named = each_once([*find_models(models, runs_dir), *find_models(runs, runs_dir)])
    if not named:
        raise UserError("no model: give RUN[:CHECKPOINT], or MODEL_JSON WEIGHTS")
    from gpt import load_model
    from harness.common.device import only_device
    from harness.evaluation.loss import TestLoss, held_out_texts, loss_lines
    from harness.model.precision import Precision
    from harness.model.tensor_names import check_weights_file

    device = only_device()
    Precision.resolve(precision, device, place="--precision")
    for model in named:
        if model.weights.exists():  # else training has deleted the checkpoint meanwhile; see below
            check_weights_file(model.weights, model.config)
    texts = [(model, held_out_texts(model, datasets_dir, **options)) for model in named]
    lost: list[str] = []
    measured: dict[tuple[str, str], list[TestLoss]] = {}  # a model that was named in two ways is measured once
    for model, of_model in texts:
        if model.identity not in measured:
            try:
                loaded = load_model(model.config, model.weights, device)
            except UserError as error:  # training has deleted the checkpoint meanwhile
                lost.append(str(error))
                continue
            measured[model.identity] = [text.measure(loaded, precision) for text in of_model]
    for line in loss_lines([(model, test) for model in named for test in measured.get(model.identity, [])]):
        click.echo(line)
    if lost:
        raise UserError(f"not measured: {'; '.join(lost)}")


if __name__ == "__main__":
    main()
