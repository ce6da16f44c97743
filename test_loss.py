"""Is the model any good? Its loss on text that neither training nor validation saw."""

from __future__ import annotations

from pathlib import Path

import click

from harness.errors import one_line_errors

# The lab notebook's test slice: FineWeb's validation split beyond what any of its runs validated on.
NOTEBOOK_DATASET = "gpjt/fineweb-gpt2-tokens"
NOTEBOOK_START_TOKEN = 50_000_000
NOTEBOOK_BATCHES = 3200


@click.command()
@click.argument("datasets_dir", type=click.Path(path_type=Path))
@click.argument("model_json", type=click.Path(path_type=Path))
@click.argument("model_safetensors", type=click.Path(path_type=Path))
@click.option("--dataset", help="owner/name or builtin/name; default: what the checkpoint was trained on.")
@click.option("--split", type=click.Choice(["test", "validation"]), help="Default: test where there is one.")
@click.option("--start-token", type=click.IntRange(min=0), help="Default: 0; of a long validation split 50,000,000.")
@click.option("--batches", type=click.IntRange(min=1), help="Default: all; of a long validation split 3,200.")
@click.option("--batch-size", type=click.IntRange(min=1), default=6, show_default=True, help="Sequences per batch.")
@click.option("--precision", type=click.Choice(["auto", "bf16", "fp16", "fp32"]), default="auto", show_default=True)
def main(datasets_dir: Path, model_json: Path, model_safetensors: Path, **options: str | int | None) -> None:
    """Print the mean loss of MODEL_SAFETENSORS (of the shape in MODEL_JSON) on a dataset in DATASETS_DIR."""
    with one_line_errors():
        from gpt import load_model
        from harness.device import only_device
        from harness.evaluate import TestSlice, bits_per_byte, slice_bytes_per_token, slice_loss
        from harness.fetch import bring
        from harness.precision import Precision
        from harness.tokens import Dataset
        from harness.weights import dataset_of

        device = only_device()
        model = load_model(model_json, model_safetensors, device)
        name = str(options["dataset"] or dataset_of(model_safetensors) or NOTEBOOK_DATASET)
        bring(datasets_dir, name, [str(options["split"])] if options["split"] else [])
        dataset = Dataset.open(datasets_dir, name)
        slice_ = TestSlice.choose(dataset, options, (NOTEBOOK_START_TOKEN, NOTEBOOK_BATCHES))
        loss = slice_loss(model, dataset, slice_, Precision.resolve(str(options["precision"]), device))
        click.echo(f"Loss against our test dataset: {loss:.3f}")
        bytes_per_token = slice_bytes_per_token(dataset, slice_, model.config.context_length)
        if bytes_per_token:
            click.echo(f"Bits per byte: {bits_per_byte(loss, bytes_per_token):.3f}")


if __name__ == "__main__":
    main()
