"""Is the model any good? Print what it makes of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.commandline import FiniteNumber
from harness.errors import one_line_errors


@click.command()
@click.argument("model_json", type=click.Path(path_type=Path))
@click.argument("model_safetensors", type=click.Path(path_type=Path))
@click.option("--prompt", default="Every effort moves you", show_default=True, help="The text to continue.")
@click.option("--num-tokens", type=click.IntRange(min=1), default=20, show_default=True, help="Tokens to add.")
@click.option("--temperature", type=FiniteNumber(min=0), default=1.0, show_default=True, help="0: the likeliest.")
@click.option("--top-k", type=click.IntRange(min=1), default=25, show_default=True, help="Of the k likeliest tokens.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=42, show_default=True, help="Same seed, same text.")
def main(model_json: Path, model_safetensors: Path, prompt: str, num_tokens: int, **options: Any) -> None:
    """Continue a prompt with the weights in MODEL_SAFETENSORS, a model of the shape in MODEL_JSON.

    The tokenizer is the one that lies beside the weights, or else GPT-2's.
    """
    with one_line_errors():
        from gpt import load_model
        from harness.device import only_device
        from harness.generate import Sampling, continue_text
        from harness.weights import tokenizer_of

        model = load_model(model_json, model_safetensors, only_device())
        sampling = Sampling(**options)
        click.echo(continue_text(model, tokenizer_of(model_safetensors), prompt, num_tokens, sampling))


if __name__ == "__main__":
    main()
