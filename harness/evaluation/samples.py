"""Prompts in, what a model makes of them out: as it comes, where there is one text to be read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import click

from harness.common.errors import UserError
from harness.common.messages import is_unicode, quoted
from harness.data.tokenizers.tokenizer import Tokenizer
from harness.evaluation.generation import (
    Sampling,
    continue_batch,
    encode_prompt,
    sample_tokens,
    until,
    up_to_the_end,
    without_end,
)
from harness.model.inference import LanguageModel


def prompts_of(file: Path | None, prompt: str | None, default: str) -> list[str]:
    """The prompts that the options --prompts and --prompt ask for. Raises UserError for both, or naming the file and
    its line."""
    if file is None:
        return [default if prompt is None else prompt]
    if prompt is not None:
        raise UserError("--prompt and --prompts: give one of them")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # other separators are part of a prompt
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"{file}: no prompts; each line is one")
    if file.suffix != ".jsonl":
        return [line.removesuffix("\r") for _, line in numbered]
    return [_json_string(line, f"{file}: line {number}") for number, line in numbered]


def _json_string(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f'{place}: not JSON; each line is a prompt in quotes: "like this"') from None
    if not isinstance(value, str) or not value or not is_unicode(value):
        raise UserError(f'{place}: {quoted(value)} is not a prompt; each line is a text in quotes: "like this"')
    return value


@dataclass(frozen=True)
class Continuations:
    """Number of continuations of a prompt, and the largest number of their tokens."""

    samples: int = 1
    tokens: int = 20


def print_samples(
    model: LanguageModel, tokenizer: Tokenizer, prompts: list[str], sampling: Sampling, wanted: Continuations
) -> None:
    """Print each prompt with its continuations.

    Raises UserError, before anything is printed, if a prompt cannot be one of this model's.
    """
    encoded = [encode_prompt(model, tokenizer, prompt) for prompt in prompts]
    for number, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True), start=1):
        if wanted.samples == 1:
            if len(prompts) > 1:
                click.echo(f"--- prompt {number} of {len(prompts)} ---")
            stream_sample(model, tokenizer, prompt, sampling, wanted.tokens)
            continue
        rows = [tokens] * wanted.samples
        vocab_size, is_done = tokenizer.vocab_size, until(wanted.tokens, tokenizer)
        texts = continue_batch(model, rows, sampling, is_done=is_done, vocab_size=vocab_size)
        for sample, more in enumerate(texts, start=1):
            which = f"prompt {number} of {len(prompts)}, " if len(prompts) > 1 else ""
            click.echo(f"--- {which}sample {sample} of {wanted.samples} ---")
            click.echo(tokenizer.decode(tokens + without_end(more, tokenizer)))


def stream_sample(model: LanguageModel, tokenizer: Tokenizer, prompt: str, sampling: Sampling, count: int) -> None:
    """Print the prompt and its continuation, each token as soon as it is there."""
    tokens = encode_prompt(model, tokenizer, prompt)
    click.echo(prompt, nl=False)
    more = up_to_the_end(sample_tokens(model, tokens, sampling, tokenizer.vocab_size), count, tokenizer)
    for piece in tokenizer.decode_stream(more):
        click.echo(piece, nl=False)
    click.echo()
