"""Print a model's scores on the benchmarks by which language models are usually compared.

uv run --extra benchmarks evaluate_benchmarks.py RUN --tasks hellaswag,arc_easy,piqa
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.common.errors import RunError, UserError
from harness.common.files import check_writable, sha256
from harness.common.libraries import configure_libraries
from harness.common.messages import REASON_CHARACTERS
from harness.common.options import MODEL, RUNS_DIR, Command

if TYPE_CHECKING:
    from harness.runs.trained_model import ModelInRun


def print_names(context: click.Context, _: click.Parameter, pattern: str | None) -> None:
    """Click callback: print the names of lm-eval's tasks, groups and tags that match `pattern` and exit, or do nothing
    if `pattern` is None."""
    if pattern is None:
        return
    configure_libraries()
    from harness.evaluation.benchmarks.run import check_installed, known_names

    check_installed()
    for name in known_names(pattern):
        click.echo(name)
    context.exit()


@click.command(cls=Command)
@MODEL
@click.option(
    "--tasks", multiple=True, required=True, metavar="NAME,...", help="lm-eval's task or group names, or task files."
)
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first N examples of each task.  [default: all]")
@click.option(
    "--num-fewshot",
    type=click.IntRange(min=0),
    help="Number of solved examples before each question. A task that sets 0 itself keeps 0.  [default: the task's "
    "own]",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=16, show_default=True, help="Texts per batch.")
@click.option("--precision", type=click.Choice(["auto", "bf16", "fp16", "fp32"]), default="auto", show_default=True)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write all results to this JSON file."
)
@click.option(
    "--list",
    metavar="GLOB",
    is_eager=True,
    expose_value=False,
    callback=print_names,
    help="Print the names of tasks, groups and tags that match a pattern, such as 'arc*'.",
)
@RUNS_DIR
def main(
    model: tuple[str, ...],
    tasks: tuple[str, ...],
    limit: int | None,
    num_fewshot: int | None,
    batch_size: int,
    precision: str,
    output: Path | None,
    runs_dir: Path,
) -> None:
    """Print the benchmark scores of a model. RUN names a run's best checkpoint (its latest if it has no best; for an
    imported run, its weights). RUN:CHECKPOINT names any checkpoint (a folder's name, `latest` or `best`). MODEL_JSON
    WEIGHTS are the two files of a model.

    --tasks takes names of lm-eval's tasks, groups and tags (hellaswag, mmlu), patterns of such names ('arc*'), and
    paths of task files (.yaml). It can be given several times. Data that is not on this machine is downloaded from the
    Hugging Face Hub. The tokenizer is the one in the folder of the weights, or GPT-2's if that folder has none. Scores
    of a run's checkpoint are also written to the run's folder results/.
    """
    configure_libraries()
    specs = [name for each in tasks for name in each.split(",") if name]
    if not specs:
        raise UserError("--tasks: give at least one name; --list '*' shows all")
    from harness.runs.trained_model import find_model

    named = find_model(model, runs_dir)
    from gpt import load_model
    from harness.common.device import device_name, only_device
    from harness.common.memory import is_out_of_memory
    from harness.evaluation.benchmarks import run as benchmarks
    from harness.evaluation.likelihood import Scorer
    from harness.model.precision import Precision
    from harness.runs.trained_model import check_tokenizer_fits, model_in_run, warned_if_not_kept

    benchmarks.check_installed()
    if output:
        check_writable(output.absolute().parent)
    device = only_device()
    loaded, tokenizer = load_model(named.config, named.weights, device), named.tokenizer()
    digest, in_run = sha256(named.weights), None  # now, because training may delete the checkpoint meanwhile
    with warned_if_not_kept():
        in_run = model_in_run(named.weights, named.config)
    check_tokenizer_fits(tokenizer, named.config.vocab_size, named.weights)
    chosen = Precision.resolve(precision, device, place="--precision")
    scorer = Scorer(loaded, chosen, tokenizer.vocab_size, batch_size)
    asked = benchmarks.load(specs, num_fewshot)
    try:
        results = benchmarks.run(asked, scorer, tokenizer, limit=limit)
    except (UserError, RunError):
        raise
    except Exception as error:  # a task's functions can raise anything, and lm-eval has asserts
        if is_out_of_memory(error):
            raise RunError(f"out of memory at --batch-size {batch_size}; lower it or free memory") from None
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RunError(
            f"lm-eval failed: {reason[:REASON_CHARACTERS]}; of several --tasks, evaluate each alone to find which fails"
        ) from None
    for line in benchmarks.table(results, asked.asked):
        click.echo(line)
    settings = {"tasks": specs, "limit": limit, "num_fewshot": num_fewshot, "precision": chosen.name}
    if in_run:
        keep_result(in_run, results, settings, device_name(device))
    if output:
        config = loaded.config.model_dump(mode="json")
        provenance = {"weights": str(named.weights), "sha256": digest, "config": config}
        about = {"model": provenance, "settings": {**settings, "batch_size": batch_size}}
        benchmarks.write_results(output, results, about)


def keep_result(measured: ModelInRun, results: dict[str, Any], settings: dict[str, Any], device: str) -> None:
    """Write the scores of all tasks and groups to the results of the model's run. If writing fails, print a warning."""
    from dataclasses import asdict
    from importlib.metadata import version

    import torch

    from harness.common.json_files import finite
    from harness.evaluation.benchmarks.run import scores
    from harness.runs.results import BenchmarkResult, BenchmarkScore, now, write_result
    from harness.runs.trained_model import warned_if_not_kept

    higher = results.get("higher_is_better", {})
    kept = [
        BenchmarkScore(
            **{**asdict(score), "value": finite(score.value), "stderr": finite(score.stderr)},
            higher_is_better=higher.get(name, {}).get(score.metric.partition(",")[0]),
        )
        for name in results["results"]
        for score in scores(results, name)
    ]
    facts = settings | {"date": now(), "device": device, "torch": torch.__version__, "lm_eval": version("lm-eval")}
    with warned_if_not_kept():
        write_result(measured.run, BenchmarkResult(weights=measured.weights, scores=kept, **facts))


if __name__ == "__main__":
    main()
