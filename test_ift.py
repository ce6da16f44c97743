"""Test a model: fine-tune it to follow instructions, and let a judge score its answers."""

from __future__ import annotations

import shlex
import signal
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.common.errors import RunError, RunStopped, UserError, explained
from harness.common.files import check_writable, sha256
from harness.common.libraries import configure_libraries
from harness.common.messages import as_unicode, is_unicode
from harness.common.options import JUDGE_PROMPT, JUDGE_PROMPT_HELP, MODEL, NOTEBOOK_JUDGE, POSITIVE, RUNS_DIR, Command

if TYPE_CHECKING:
    from harness.evaluation.instruct.responses import Responses
    from harness.evaluation.judge.requests import JudgeSettings

RESPONSES = "ift-responses.json"
# Data of the book on which these models are based: Raschka, Build a Large Language Model (From Scratch), chapter 7.
BOOK_DATA = (
    "https://raw.githubusercontent.com/rasbt/LLMs-from-scratch/main/ch07/01_main-chapter-code/instruction-data.json"
)


@click.command(cls=Command)
@MODEL
@click.option(
    "--data",
    default=BOOK_DATA,
    help="File or web address of the instructions.  [default: those of Raschka's book, downloaded once]",
)
@click.option(
    "--responses",
    type=click.Path(path_type=Path),
    help=f"File for the responses.  [default: {RESPONSES} beside model.json]",
)
@click.option("--overwrite", is_flag=True, help="Replace a responses file that exists already.")
@click.option("--responses-only", is_flag=True, help="Write the responses, and ask no judge.")
@click.option("--name", help="Name of the model in tables.  [default: its run's and checkpoint's names]")
@click.option("--save", type=click.Path(path_type=Path), help="Keep the fine-tuned model in this new folder.")
@click.option("--answers-only", is_flag=True, help="Learn the answers alone, not the instructions.")
@click.option("--learning-rate", type=POSITIVE, help="[default: 5e-5 x 768 / emb_dim]")
@click.option(
    "--max-epochs",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Stop after this many epochs even if the validation loss has not risen.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Longest answer, in tokens."
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=123, show_default=True)
@click.option("--judge-model", default=NOTEBOOK_JUDGE, show_default=True)
@click.option("--judge-prompt", type=JUDGE_PROMPT, default="together", show_default=True, help=JUDGE_PROMPT_HELP)
@click.option("--base-url", help="The judge's endpoint.  [default: OPENAI_BASE_URL, or OpenAI's]")
@RUNS_DIR
def main(model: tuple[str, ...], runs_dir: Path, **options: Any) -> None:
    """Fine-tune a model on instructions until its validation loss rises. Then answer the test instructions with the
    weights from before the rise, and let a judge score the answers. RUN names a run's best checkpoint (its latest if it
    has no best; for an imported run, its weights). RUN:CHECKPOINT names any checkpoint (a folder's name, `latest` or
    `best`). MODEL_JSON WEIGHTS are the two files of a model.

    A model's score may differ by several points if it is judged again. To compare models, use --responses-only for each
    of them, and then judge_ift.py on all files at once. If the responses file is in the run's folder, a checkpoint's
    scores are also written to results/ there.
    """
    configure_libraries()
    from harness.runs.trained_model import find_model

    named = find_model(model, runs_dir)
    path = options["responses"] or named.folder / RESPONSES
    judge = None if options["responses_only"] else choose_judge(options)
    check_places(path, options)
    import torch

    from gpt import load_model
    from harness.common.device import device_name, only_device
    from harness.evaluation.instruct import finetune, responses
    from harness.runs.trained_model import check_tokenizer_fits, model_in_run, write_model

    data = responses.local_instructions(options["data"])
    splits, device = responses.InstructionSplits.load(data), only_device()
    weights = None
    if measured := model_in_run(named.weights, named.config):
        checkpoint, digest = measured.weights.checkpoint, measured.weights.sha256
        weights = responses.AnsweringModel(
            checkpoint=checkpoint, sha256=digest, device=device_name(device), torch=torch.__version__
        )
    tuned, tokenizer = load_model(named.config, named.weights, device), named.tokenizer()
    check_tokenizer_fits(tokenizer, named.config.vocab_size, named.weights)
    rate = options["learning_rate"] or finetune.RATE_TIMES_WIDTH / named.config.emb_dim
    settings = finetune.FineTuneSettings(rate, options["max_epochs"], options["seed"], options["answers_only"])
    with explained(f"{options['data']}: "):
        tuning = finetune.fine_tune(tuned, tokenizer, splits, settings)
    # The default name is `run/checkpoint`, or `run` if the weights are beside model.json.
    run, folder = named.folder.absolute(), named.weights.absolute().parent
    own_name = run.name if folder == run else f"{run.name}/{folder.resolve().name}"
    name, longest = options["name"] or as_unicode(own_name), options["max_new_tokens"]
    about_data = responses.InstructionData(
        file=as_unicode(data.name),
        sha256=sha256(data),
        entries=sum(map(len, splits)),
        test_entries=len(splits.test),
    )
    course = {**asdict(settings), "max_new_tokens": longest, **asdict(tuning)}
    answers = finetune.answer(tuned, tokenizer, splits.test, longest)
    answered = responses.Responses(model=name, weights=weights, data=about_data, fine_tuning=course, responses=answers)
    if not options["overwrite"]:  # another process may have written its answers there meanwhile
        names = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
        path = next(each for each in chain([path], names) if not each.exists())
    responses.write_responses(path, answered)
    click.echo(f"{path}: {len(answers):,} answers")
    if options["save"]:
        facts = {"fine_tuned_from": name, "data": about_data.model_dump(), "fine_tuning": course}
        shape, kept_tokenizer = tuned.config.model_dump(mode="json"), named.tokenizer_file
        write_model(options["save"], shape, tuned.to_checkpoint_names(), tokenizer=kept_tokenizer, facts=facts)
        click.echo(f"{options['save']}: the fine-tuned model")
    if judge is not None:
        score(answered, judge, path)


def choose_judge(options: dict[str, Any]) -> JudgeSettings:
    """Return the judge's settings, without asking the judge. Raises UserError if they are not valid, or if the API key
    or the openai package is missing. Call before any training."""
    from harness.evaluation.judge.requests import JudgeClient, JudgeSettings

    settings = JudgeSettings.choose(options["judge_model"], options["base_url"], prompt=options["judge_prompt"])
    with explained(after="; or use --responses-only"):
        JudgeClient(settings)
    return settings


def check_places(path: Path, options: dict[str, Any]) -> None:
    """Raise UserError if the responses file `path`, --name or the folder --save cannot be used.

    Call before anything is downloaded or trained.
    """
    if path.is_dir() or (path.exists() and not options["overwrite"]):
        raise UserError(
            f"{path}: exists; --overwrite replaces it, unless it is a folder; --responses FILE writes to another place"
        )
    check_writable(path.parent)
    if options["save"] and (options["save"].exists() or options["save"].absolute() == path.absolute()):
        raise UserError(f"{options['save']}: exists, or is the responses file; give --save another folder")
    if options["save"]:
        check_writable(next(folder for folder in options["save"].absolute().parents if folder.exists()))
    if options["name"] is not None and not (options["name"].strip() and is_unicode(options["name"])):
        raise UserError(f"--name {options['name']!r}: blank or not valid Unicode; give another name")


def score(responses: Responses, settings: JudgeSettings, path: Path) -> None:
    """Ask the judge to score the answers, and print the scores.

    The scores are also written to the run that has the weights, if the responses file `path` is in its folder. The
    judge's answers are kept in judgements.jsonl beside `path`.
    """
    from harness.evaluation.judge.report import judge_and_report

    options = ["--model", settings.model, "--base-url", settings.base_url, "--prompt", settings.prompt]
    again = f"uv run --extra judge {shlex.join(['judge_ift.py', str(path), *options])}"
    try:
        judge_and_report([path], [responses], settings, [path.parent / "judgements.jsonl"])
    except KeyboardInterrupt:
        click.echo(f"stopped by SIGINT; the answers are kept; to continue: {again}", err=True)
        raise RunStopped(signal.SIGINT) from None
    except (UserError, RunError) as error:  # `again` judges the kept answers; no new training
        raise RunError(f"{error}; the model's answers are kept: `{again}` scores them") from None


if __name__ == "__main__":
    main()
