"""Convert models to and from the formats of Hugging Face's transformers: export, import, publish."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.common.errors import UserError
from harness.common.libraries import configure_libraries
from harness.common.messages import is_hub_name
from harness.common.options import RUNS_DIR, Group

if TYPE_CHECKING:
    from harness.runs.trained_model import TrainedModel

CHECKPOINT = click.argument("checkpoint", metavar="RUN[:CHECKPOINT]")
MODEL_JSON = click.option("--model-json", help="model.json of the weights.  [default: what their folder or run has]")
DTYPE = click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True)
READERS = {"transformers": "transformers", "notebook": "the lab notebook's scripts"}


@click.group(cls=Group)
def main() -> None:
    """Export models for transformers, or for the scripts of Giles Thomas's lab notebook
    (github.com/gpjt/ddp-base-model-from-scratch). Import models. Publish models on the Hugging Face Hub. An export
    for transformers uses transformers' native class for the model, if there is one."""


@main.command("export", short_help="Write a model for transformers or the lab notebook.")
@CHECKPOINT
@click.argument("out", type=click.Path(path_type=Path))
@MODEL_JSON
@DTYPE
@click.option("--format", "format_", type=click.Choice(list(READERS)), default="transformers", show_default=True)
@RUNS_DIR
def export(checkpoint: str, out: Path, model_json: str | None, dtype: str, format_: str, runs_dir: Path) -> None:
    """Write a model to the new folder OUT. RUN names a run's best checkpoint (its latest if it has no best; for an
    imported run, its weights). RUN:CHECKPOINT names any checkpoint (a folder's name, `latest` or `best`). RUN can also
    be any other folder with model.json and model.safetensors.

    transformers.AutoModelForCausalLM and AutoTokenizer can load OUT, and so can programs that use them. A model for
    which transformers has no class is written with its own code, which runs only with trust_remote_code=True.

    With --format notebook, OUT has a model.json and a model.safetensors for the scripts of Giles Thomas's lab notebook
    (github.com/gpjt/ddp-base-model-from-scratch). Their load_state_dict requires attention masks and a separate output
    head, so both are written, too.
    """
    configure_libraries()
    files = find_files(checkpoint, model_json, runs_dir)
    import torch

    from gpt import load_model
    from harness.hf.export import export_for_notebook, export_model

    model = load_model(files.config, files.weights, torch.device("cpu"))
    if format_ == "notebook":
        notes = export_for_notebook(model, files, out, dtype)
    else:
        notes = []
        export_model(model, files, out, dtype)
    reader = READERS[format_]
    if format_ == "transformers" and (out / "gpt.py").exists():
        reader += ", with code of its own (trust_remote_code=True)"
    click.echo(f"{out}: {model.config.parameters:,} parameters, {dtype}, for {reader}")
    for note in notes:
        click.echo(note, err=True)


@main.command("import", short_help="Import a GPT-2 of transformers as a run.")
@click.argument("source")
@click.argument("run")
@RUNS_DIR
def import_(source: str, run: str, runs_dir: Path) -> None:
    """Import a model as the new run RUN. The model is a GPT-2 (OpenAI's small to XL, or another of this architecture),
    or one that Giles Thomas (github.com/gpjt) published ("model_type": "gpjtgpt2").

    SOURCE is a folder that transformers saved, or the name of a model on the Hugging Face Hub, such as
    openai-community/gpt2. Only weights, configuration and tokenizer are read; code that comes with a model is neither
    downloaded nor run.
    """
    configure_libraries()
    from harness.common.files import check_name
    from harness.hf.import_model import fetch_model, import_model

    folder = runs_dir / check_name(run, "run")
    if folder.exists():
        raise UserError(f"{folder}: exists; choose another name for the run, or move it away")
    is_folder = Path(source).is_dir()
    where = Path(source) if is_folder else fetch_model(source)
    # Only a name on the Hub is recorded. A local path is private, and the card of a published model shows what is
    # recorded.
    said = import_model(where, None if is_folder else source, folder)
    click.echo(f"{folder}: wrote model.json and model.safetensors; {said}")


@main.command("publish", short_help="Upload a model with its card to the Hugging Face Hub.")
@CHECKPOINT
@click.argument("name", metavar="OWNER/NAME")
@MODEL_JSON
@DTYPE
@click.option("--public", is_flag=True, help="Make a new repository public.  [default: private]")
@click.option("--license", "license_", help="License on the card, as the Hub spells it: apache-2.0, mit, ...")
@click.option(
    "--datasets-dir",
    type=click.Path(path_type=Path),
    help="Folder of datasets; measure the test loss on those that test_loss.py uses by default.",
)
@click.option("--card", is_flag=True, help="Print the card, and upload nothing.")
@RUNS_DIR
def publish(checkpoint: str, name: str, **options: Any) -> None:
    """Export a model (RUN[:CHECKPOINT] as in the command export), write its model card from the files of the run that
    made it, and upload both to the Hugging Face Hub, with the run's settings, metrics, summary and chart."""
    configure_libraries()
    if not is_hub_name(name):
        raise UserError(f"{name}: not the name of a repository on the Hub; give owner/name")
    files = find_files(checkpoint, options["model_json"], options["runs_dir"])
    from tempfile import TemporaryDirectory

    import torch

    from gpt import load_model
    from harness.common.device import only_device
    from harness.evaluation.loss import held_out_texts
    from harness.hf.export import export_model
    from harness.hf.publish import ModelFacts, model_card, upload_model

    model = load_model(files.config, files.weights, torch.device("cpu"))
    tests = []
    if options["datasets_dir"]:
        texts = held_out_texts(files, options["datasets_dir"])
        tests = [text.measure(model.to(only_device()), "auto") for text in texts]
    facts = ModelFacts(name, files, tests, options["license_"])
    if options["card"]:
        click.echo(model_card(facts), nl=False)
        return
    with TemporaryDirectory() as folder:
        exported = Path(folder) / "model"
        export_model(model, files, exported, options["dtype"])
        click.echo(f"Uploaded to {upload_model(exported, facts, public=options['public'])}")
    if files.datasets and not tests:
        click.echo("The card has no test loss; --datasets-dir DIR measures it")


def find_files(checkpoint: str, model_json: str | None, runs_dir: Path) -> TrainedModel:
    """Return the files of the model that the command line names. Raises UserError if there is no such model."""
    from harness.model.tensor_names import WEIGHTS
    from harness.runs.trained_model import find_model

    path = Path(checkpoint)
    if not model_json:
        return find_model([checkpoint], runs_dir)
    if not (path.is_file() or (path / WEIGHTS).is_file()):  # a run
        path = find_model([checkpoint], runs_dir).weights
    return find_model([model_json, str(path)], runs_dir)


if __name__ == "__main__":
    main()
