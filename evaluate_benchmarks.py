"""Is the model any good? Its scores in the benchmarks that the field compares models by.

uv run --extra benchmarks evaluate_benchmarks.py RUN --tasks hellaswag,arc_easy,piqa
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.common.errors import UserError, one_line_errors
from harness.common.libraries import configure_libraries
from harness.common.options import MODEL, RUNS_DIR, Command

if TYPE_CHECKING:
    from harness.runs.results import BenchmarkResult
    from harness.runs.trained_model import ModelInRun, TrainedModel


def print_names(context: click.Context, _: click.Parameter, pattern: str | None) -> None:
    """Print lm-eval's names and end."""
    if pattern is None:
        return
    configure_libraries()
    with one_line_errors():
        from harness.evaluation.benchmarks.tasks import check_installed, known_names

        check_installed()
        for name in known_names([pattern]):
            click.echo(name)
    context.exit()


@click.command(cls=Command)
@MODEL
@click.option("--tasks", multiple=True, required=True, metavar="NAME,...", help="lm-eval's names, or task files.")
@click.option("--limit", type=click.IntRange(min=1), help="The first N examples of each task.  [default: all]")
@click.option("--num-fewshot", type=click.IntRange(min=0), help="Solved examples shown.  [default: each task's]")
@click.option("--batch-size", type=click.IntRange(min=1), default=16, show_default=True, help="Texts per batch.")
@click.option("--precision", type=click.Choice(["auto", "bf16", "fp16", "fp32"]), default="auto", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write everything to this JSON file, too.")
@click.option(
    "--list",
    metavar="GLOB",
    is_eager=True,
    expose_value=False,
    callback=print_names,
    help="Print the names that match, such as 'arc*'.",
)
@RUNS_DIR
def main(model: tuple[str, ...], tasks: tuple[str, ...], runs_dir: Path, **options: Any) -> None:
    """Print how well a model does in benchmarks: the best of RUN, its CHECKPOINT (a folder's name, `latest` or `best`),
    or WEIGHTS, of the shape in MODEL_JSON.

    --tasks takes names of lm-eval's tasks, groups and tags (hellaswag, mmlu, 'arc*'), and paths of task files (.yaml),
    and can be given several times. Data comes from the Hugging Face Hub. The tokenizer is the one that lies beside the
    weights, or else GPT-2's. What is measured of a run's checkpoint stays in the run's folder results/.
    """
    configure_libraries()
    with one_line_errors():
        specs = [name for each in tasks for name in each.split(",") if name]
        if not specs:
            raise UserError("--tasks: give at least one name; --list '*' shows all")
        from harness.runs.trained_model import find_model

        evaluate(find_model(model, runs_dir), specs, options)


def evaluate(named: TrainedModel, specs: list[str], options: dict[str, Any]) -> None:
    """Load the model and the tasks, run them, print the table, and write the file that was asked for."""
    from gpt import load_model
    from harness.common.device import device_name, only_device
    from harness.common.files import sha256
    from harness.evaluation.benchmarks.report import check_output, table, write_results
    from harness.evaluation.benchmarks.run import explained_failures, load, run
    from harness.evaluation.benchmarks.tasks import check_installed
    from harness.evaluation.likelihood import Scorer
    from harness.model.precision import Precision
    from harness.runs.results import write_result
    from harness.runs.trained_model import check_tokenizer_fits, model_in_run, tokenizer_of, warned_if_not_kept

    check_installed()
    if options["output"]:
        check_output(options["output"])
    device = only_device()
    weights = named.weights
    model, tokenizer = load_model(named.config, weights, device), tokenizer_of(weights)
    check_tokenizer_fits(tokenizer, model.config.vocab_size, weights)
    precision = Precision.resolve(options["precision"], device)
    scorer = Scorer(model, precision, tokenizer.vocab_size, options["batch_size"])
    benchmarks = load(specs, options["num_fewshot"])
    with explained_failures(options["batch_size"]):
        results = run(benchmarks, scorer, tokenizer, limit=options["limit"])
    for line in table(results, benchmarks):
        click.echo(line)
    settings = {"tasks": specs, **{key: options[key] for key in ("limit", "num_fewshot")}, "precision": precision.name}
    with warned_if_not_kept():
        if measured := model_in_run(weights):
            write_result(measured.run, result_of(results, measured, settings, device_name(device)))
    if options["output"]:
        config = model.config.model_dump(mode="json")
        provenance = {"weights": str(weights), "sha256": sha256(weights), "config": config}
        about = {"model": provenance, "settings": {**settings, "batch_size": options["batch_size"]}}
        write_results(options["output"], results, about)


def result_of(results: dict[str, Any], measured: ModelInRun, settings: dict[str, Any], device: str) -> BenchmarkResult:
    """Return the result to keep in the run: the metrics of all tasks and groups."""
    from importlib.metadata import version

    import torch

    from harness.common.json_files import finite
    from harness.evaluation.benchmarks.run import scores
    from harness.runs.results import BenchmarkResult, BenchmarkScore, now

    kept = [
        BenchmarkScore(
            task=score.task,
            metric=score.metric,
            value=finite(score.value),
            stderr=finite(score.stderr),
            examples=score.examples,
            higher_is_better=results.get("higher_is_better", {}).get(name, {}).get(score.metric.partition(",")[0]),
        )
        for name in results["results"]
        for score in scores(results, name)
    ]
    return BenchmarkResult(
        weights=measured.weights,
        date=now(),
        device=device,
        torch=torch.__version__,
        lm_eval=version("lm-eval"),
        scores=kept,
        **settings,
    )


if __name__ == "__main__":
    main()
