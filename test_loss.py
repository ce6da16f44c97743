"""Is the model any good? Its loss on text that neither training nor validation saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.common.errors import one_line_errors
from harness.common.libraries import configure_libraries
from harness.common.options import Command

APPROXIMATE = " (approximate: by the whole split's mean, since the tokenizer's vocabulary is not on this machine)"


@click.command(cls=Command)
@click.argument("datasets_dir", type=click.Path(path_type=Path))
@click.argument("model_json", type=click.Path(path_type=Path))
@click.argument("model_safetensors", type=click.Path(path_type=Path))
@click.option("--dataset", help="owner/name or builtin/name; default: what the checkpoint was trained on.")
@click.option("--split", type=click.Choice(["test", "validation"]), help="Default: test where there is one.")
@click.option(
    "--start-token", type=click.IntRange(min=0), help="Default: 0, or 50,000,000 of a longer validation split."
)
@click.option("--batches", type=click.IntRange(min=1), help="Default: all, but 3,200 at most of such a split.")
@click.option("--batch-size", type=click.IntRange(min=1), default=6, show_default=True, help="Sequences per batch.")
@click.option("--precision", type=click.Choice(["auto", "bf16", "fp16", "fp32"]), default="auto", show_default=True)
def main(datasets_dir: Path, model_json: Path, model_safetensors: Path, **options: Any) -> None:
    """Print the mean loss of MODEL_SAFETENSORS (of the shape in MODEL_JSON) on a dataset in DATASETS_DIR."""
    configure_libraries()
    with one_line_errors():
        from gpt import load_model
        from harness.common.device import only_device
        from harness.evaluation.loss import TestLossOptions, measure_test_loss

        model = load_model(model_json, model_safetensors, only_device())
        result = measure_test_loss(model, model_safetensors, datasets_dir, TestLossOptions(**options))
        click.echo(f"Loss against our test dataset: {result.loss:.3f}")
        if result.bits_per_byte is not None:
            click.echo(f"Bits per byte: {result.bits_per_byte:.3f}{'' if result.is_exact else APPROXIMATE}")
        click.echo(f"Measured on {result.place}")


if __name__ == "__main__":
    main()
