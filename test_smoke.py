"""Test a model: print its continuations of prompts."""

from __future__ import annotations

from pathlib import Path

import click

from harness.common.libraries import configure_libraries
from harness.common.options import MODEL, RUNS_DIR, Command, FiniteNumber

DEFAULT_PROMPT = "Every effort moves you"


@click.command(cls=Command)
@MODEL
@click.option("--prompt", help=f"The text to continue.  [default: {DEFAULT_PROMPT}]")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="File with a prompt on each line; in a .jsonl file, each line is a JSON string.",
)
@click.option("--num-tokens", type=click.IntRange(min=1), default=20, show_default=True, help="Add at most N tokens.")
@click.option(
    "--samples", type=click.IntRange(min=1), default=1, show_default=True, help="Continuations of each prompt."
)
@click.option(
    "--temperature",
    type=FiniteNumber(min=0),
    default=1.0,
    show_default=True,
    help="0 always takes the likeliest token.",
)
@click.option(
    "--top-k", type=click.IntRange(min=1), default=25, show_default=True, help="Sample from the k likeliest tokens."
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=42, show_default=True, help="Same seed, same text.")
@RUNS_DIR
def main(
    model: tuple[str, ...],
    prompt: str | None,
    prompts: Path | None,
    num_tokens: int,
    samples: int,
    temperature: float,
    top_k: int,
    seed: int,
    runs_dir: Path,
) -> None:
    """Continue prompts with a trained model. RUN names a run's best checkpoint (its latest if it has no best; for an
    imported run, its weights). RUN:CHECKPOINT names any checkpoint (a folder's name, `latest` or `best`). MODEL_JSON
    WEIGHTS are the two files of a model.

    A text ends after --num-tokens tokens, or when the model produces the end-of-text token. The tokenizer is the one in
    the folder of the weights, or GPT-2's if that folder has none.
    """
    configure_libraries()
    from harness.runs.trained_model import find_model

    named = find_model(model, runs_dir)
    from gpt import load_model
    from harness.common.device import only_device
    from harness.evaluation.generation import Sampling, print_samples, prompts_of

    texts = prompts_of(prompts, prompt, DEFAULT_PROMPT)
    loaded = load_model(named.config, named.weights, only_device())
    sampling = Sampling(temperature, top_k, seed)
    print_samples(loaded, named.tokenizer(), texts, sampling, samples=samples, count=num_tokens)


if __name__ == "__main__":
    main()
