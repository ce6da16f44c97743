"""Is the model any good? Print what it makes of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.common.errors import one_line_errors
from harness.common.libraries import configure_libraries
from harness.common.options import Command, FiniteNumber

DEFAULT_PROMPT = "Every effort moves you"


@click.command(cls=Command)
@click.argument("model_json", type=click.Path(path_type=Path))
@click.argument("model_safetensors", type=click.Path(path_type=Path))
@click.option("--prompt", help=f"The text to continue.  [default: {DEFAULT_PROMPT}]")
@click.option("--prompts", type=click.Path(path_type=Path), help="A prompt a line; in a .jsonl file: a JSON string.")
@click.option("--num-tokens", type=click.IntRange(min=1), default=20, show_default=True, help="At most.")
@click.option("--samples", type=click.IntRange(min=1), default=1, show_default=True, help="Continuations of each.")
@click.option("--temperature", type=FiniteNumber(min=0), default=1.0, show_default=True, help="0: the likeliest.")
@click.option("--top-k", type=click.IntRange(min=1), default=25, show_default=True, help="Of the k likeliest tokens.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=42, show_default=True, help="Same seed, same text.")
def main(model_json: Path, model_safetensors: Path, **options: Any) -> None:
    """Continue prompts with the weights in MODEL_SAFETENSORS, a model of the shape in MODEL_JSON.

    A text ends after --num-tokens, or where the model says that it ends (end-of-text). The tokenizer is the one that
    lies beside the weights, or else GPT-2's.
    """
    configure_libraries()
    with one_line_errors():
        from gpt import load_model
        from harness.common.device import only_device
        from harness.evaluation.generation import Sampling
        from harness.evaluation.samples import Continuations, print_samples, prompts_of
        from harness.runs.model_folder import tokenizer_of

        prompts = prompts_of(options["prompts"], options["prompt"], DEFAULT_PROMPT)
        model = load_model(model_json, model_safetensors, only_device())
        sampling = Sampling(options["temperature"], options["top_k"], options["seed"])
        tokenizer = tokenizer_of(model_safetensors)
        wanted = Continuations(options["samples"], options["num_tokens"])
        print_samples(model, tokenizer, prompts, sampling, wanted)


if __name__ == "__main__":
    main()
