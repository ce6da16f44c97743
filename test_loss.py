"""Is the model any good? Its loss on text that neither training nor validation saw; of several models a table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.common.errors import UserError, one_line_errors
from harness.common.libraries import configure_libraries
from harness.common.options import Command

if TYPE_CHECKING:
    from harness.evaluation.held_out import TestLoss, TestLossOptions
    from harness.evaluation.loss_table import ModelLoss
    from harness.runs.named_models import NamedModel

APPROXIMATE = " (approximate: by the whole split's mean, since the tokenizer's vocabulary is not on this machine)"


@click.command(cls=Command)
@click.argument("datasets_dir", type=click.Path(path_type=Path))
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[MODEL_JSON MODEL_SAFETENSORS]...")
@click.option(
    "--run",
    "runs",
    multiple=True,
    metavar="RUN[:CHECKPOINT]",
    help="A run's best model, or the one named; 'lr-*': of all such runs.",
)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--dataset", help="owner/name or builtin/name; default: what the checkpoint was trained on.")
@click.option("--split", type=click.Choice(["test", "validation"]), help="Default: test where there is one.")
@click.option(
    "--start-token", type=click.IntRange(min=0), help="Default: 0, or 50,000,000 of a longer validation split."
)
@click.option("--batches", type=click.IntRange(min=1), help="Default: all, but 3,200 at most of such a split.")
@click.option("--batch-size", type=click.IntRange(min=1), default=6, show_default=True, help="Sequences per batch.")
@click.option("--precision", type=click.Choice(["auto", "bf16", "fp16", "fp32"]), default="auto", show_default=True)
def main(datasets_dir: Path, files: tuple[Path, ...], runs: tuple[str, ...], runs_dir: Path, **options: Any) -> None:
    """Print the mean loss of MODEL_SAFETENSORS (of the shape in MODEL_JSON) on a dataset in DATASETS_DIR.

    Of several models, given by their files or by --run, a table, lowest loss first. What is measured of a run's
    checkpoint stays in the run's folder results/.
    """
    configure_libraries()
    with one_line_errors():
        from harness.evaluation.held_out import TestLossOptions
        from harness.evaluation.loss_table import loss_tables
        from harness.runs.named_models import each_once, models_of_files, models_of_runs

        of_runs = (model for run in runs for model in models_of_runs(runs_dir, run))
        models = each_once([*models_of_files(files), *of_runs])
        if not models:
            raise UserError("no model: give MODEL_JSON MODEL_SAFETENSORS, or --run RUN")
        found = measure_all(models, datasets_dir, TestLossOptions(**options))
        for line in lines_of_one(found[0].test) if len(found) == 1 else loss_tables(found):
            click.echo(line)


def measure_all(models: Sequence[NamedModel], datasets_dir: Path, options: TestLossOptions) -> list[ModelLoss]:
    """The models' losses, each of which stays in its run; one that was named in two ways is measured once. Raises
    UserError, before anything is measured, if a model or the text for it cannot be had."""
    from gpt import load_model
    from harness.common.device import only_device
    from harness.evaluation.held_out import HeldOutText
    from harness.evaluation.loss_table import ModelLoss, recorded_global_batch
    from harness.model.config import load_model_config
    from harness.model.precision import Precision
    from harness.model.tensor_names import check_weights_file

    device = only_device()
    Precision.resolve(options.precision, device)
    configs = [load_model_config(model.model_json) for model in models]
    for model, config in zip(models, configs, strict=True):
        check_weights_file(model.weights, config)
    pairs = zip(models, configs, strict=True)
    texts = [HeldOutText.choose(config, model.weights, datasets_dir, options) for model, config in pairs]
    measured: dict[tuple[Path, Path], TestLoss] = {}
    for model, text in zip(models, texts, strict=True):
        if model.files not in measured:
            measured[model.files] = text.measure(load_model(model.model_json, model.weights, device), options.precision)
            measured[model.files].keep(model.weights)
    return [
        ModelLoss(model.label, config.parameters, recorded_global_batch(model.weights), measured[model.files])
        for model, config in zip(models, configs, strict=True)
    ]


def lines_of_one(test: TestLoss) -> list[str]:
    """What there is to say of one model, in lines of 80 columns."""
    from harness.evaluation.loss_table import COLUMNS

    lines = [f"Loss on the {test.text.split} split: {test.loss:.3f}"]
    if test.bits_per_byte is not None:
        lines.append(f"Bits per byte: {test.bits_per_byte:.3f}{'' if test.is_exact else APPROXIMATE}")
    lines.append(f"Measured on {test.place}")
    return [part for line in lines for part in textwrap.wrap(line, COLUMNS, subsequent_indent="  ")]


if __name__ == "__main__":
    main()
