"""Is the model any good? Its loss on text that neither training nor validation saw; of several models a table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.common.errors import UserError, one_line_errors
from harness.common.libraries import configure_libraries
from harness.common.options import RUNS_DIR, Command

if TYPE_CHECKING:
    from harness.evaluation.held_out import TestLoss, TestLossOptions
    from harness.evaluation.loss_table import ModelLoss
    from harness.runs.trained_model import TrainedModel

APPROXIMATE = " (approximate: by the whole split's mean, since the tokenizer's vocabulary is not on this machine)"


@click.command(cls=Command)
@click.argument("datasets_dir", type=click.Path(path_type=Path))
@click.argument("models", nargs=-1, metavar="[RUN[:CHECKPOINT] | MODEL_JSON WEIGHTS]...")
@click.option("--run", "runs", multiple=True, metavar="RUN[:CHECKPOINT]", help="The same, as an option.")
@RUNS_DIR
@click.option("--dataset", help="owner/name or builtin/name; default: what the checkpoint was trained on.")
@click.option("--split", type=click.Choice(["test", "validation"]), help="Default: test where there is one.")
@click.option(
    "--start-token", type=click.IntRange(min=0), help="Default: 0, or 50,000,000 of a longer validation split."
)
@click.option("--batches", type=click.IntRange(min=1), help="Default: all, but 3,200 at most of such a split.")
@click.option("--batch-size", type=click.IntRange(min=1), default=6, show_default=True, help="Sequences per batch.")
@click.option("--precision", type=click.Choice(["auto", "bf16", "fp16", "fp32"]), default="auto", show_default=True)
def main(datasets_dir: Path, models: tuple[str, ...], runs: tuple[str, ...], runs_dir: Path, **options: Any) -> None:
    """Print the mean loss of a model on a dataset in DATASETS_DIR: of the best of RUN (of 'lr-*': of all such runs), of
    its CHECKPOINT (a folder's name, `latest` or `best`), or of WEIGHTS, of the shape in MODEL_JSON.

    Of several models a table, lowest loss first. What is measured of a run's checkpoint stays in the run's folder
    results/.
    """
    configure_libraries()
    with one_line_errors():
        from harness.runs.trained_model import each_once, find_models

        named = each_once([*find_models(models, runs_dir), *find_models(runs, runs_dir)])
        if not named:
            raise UserError("no model: give RUN[:CHECKPOINT], or MODEL_JSON WEIGHTS")
        from harness.evaluation.held_out import TestLossOptions
        from harness.evaluation.loss_table import loss_tables

        found = measure_all(named, datasets_dir, TestLossOptions(**options))
        for line in lines_of_one(found[0].test) if len(found) == 1 else loss_tables(found):
            click.echo(line)


def measure_all(models: Sequence[TrainedModel], datasets_dir: Path, options: TestLossOptions) -> list[ModelLoss]:
    """The models' losses, each of which stays in its run; one that was named in two ways is measured once. Raises
    UserError, before anything is measured, if a model or the text for it cannot be had."""
    from gpt import load_model
    from harness.common.device import only_device
    from harness.evaluation.held_out import HeldOutText
    from harness.evaluation.loss_table import ModelLoss, recorded_global_batch
    from harness.model.precision import Precision
    from harness.model.tensor_names import check_weights_file

    device = only_device()
    Precision.resolve(options.precision, device)
    for model in models:
        check_weights_file(model.weights, model.config)
    texts = [HeldOutText.choose(model.config, model.weights, datasets_dir, options) for model in models]
    measured: dict[tuple[str, str], TestLoss] = {}
    for model, text in zip(models, texts, strict=True):
        if model.identity not in measured:
            measured[model.identity] = text.measure(load_model(model.config, model.weights, device), options.precision)
            measured[model.identity].keep(model.weights)
    return [
        ModelLoss(model.label, model.config.parameters, recorded_global_batch(model.weights), measured[model.identity])
        for model in models
    ]


def lines_of_one(test: TestLoss) -> list[str]:
    """Describe the loss of one model, in lines of 80 columns."""
    from harness.evaluation.loss_table import COLUMNS

    lines = [f"Loss on the {test.text.split} split: {test.loss:.3f}"]
    if test.bits_per_byte is not None:
        lines.append(f"Bits per byte: {test.bits_per_byte:.3f}{'' if test.is_exact else APPROXIMATE}")
    lines.append(f"Measured on {test.place}")
    return [part for line in lines for part in textwrap.wrap(line, COLUMNS, subsequent_indent="  ")]


if __name__ == "__main__":
    main()
