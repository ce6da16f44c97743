"""Text generation with a key-value cache. Also reads prompts and prints samples for test_smoke.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

import click
import torch
from torch import Tensor

from gpt import GPTModel
from harness.common.errors import RunError, UserError
from harness.common.files import read_text
from harness.common.messages import escape_controls, is_unicode
from harness.data.tokenizers import Tokenizer
from harness.model.inference import KeyValueCache, evaluating

CHARACTER_BYTES = 4  # of the longest character in UTF-8
COLDEST = 1e-4  # below it, practically only the likeliest token would be drawn, and dividing by 0 is impossible


@dataclass(frozen=True)
class Sampling:
    """Rule by which the next token is chosen. torch's global generator is not used."""

    temperature: float = 1.0  # below COLDEST, the likeliest token is taken
    top_k: int | None = 25  # number of likeliest tokens to draw from; None: all tokens
    seed: int = 42  # row i of a batch draws with the seed `seed + i`


GREEDY = Sampling(temperature=0.0)


def encode_prompt(model: GPTModel, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the prompt's tokens. Raises UserError if the prompt is empty, is not valid Unicode, or has a token beyond
    the model's vocabulary."""
    tokens = tokenizer.encode(prompt)
    vocab_size = model.config.vocab_size
    if not tokens:
        raise UserError("the prompt is empty; give at least one character")
    if max(tokens) >= vocab_size:
        raise UserError(
            f"the prompt has token id {max(tokens)}, beyond the model's vocabulary of {vocab_size}: the tokenizer is "
            "another model's; put the right tokenizer beside the weights, and its file name into meta.json as "
            '"tokenizer"'
        )
    return tokens


def continue_text(model: GPTModel, tokenizer: Tokenizer, prompt: str, count: int, sampling: Sampling) -> str:
    """Return the prompt continued by up to `count` tokens. `count` must be at least 1. Raises UserError if the prompt
    cannot be encoded, and RunError if a logit is not finite."""
    tokens = encode_prompt(model, tokenizer, prompt)
    [more] = continue_prompts(model, tokenizer, [tokens], count, sampling)
    return tokenizer.decode(tokens + more)


def continue_prompts(
    model: GPTModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling,
    stops: Sequence[str] = (),
) -> list[list[int]]:
    """Return up to `count` new tokens for each prompt. `count` must be at least 1, and no prompt may be empty.

    The new tokens end before an end-of-text token, or with the token that completes one of the texts `stops`. Raises
    RunError if a logit is not finite.
    """
    # Number of last tokens to search for a stop string. Each token has at least one byte, so a stop string of n bytes
    # that has just been completed is in the last n tokens. The first of these n tokens may begin inside a character.
    # Decoding CHARACTER_BYTES more tokens completes this character.
    reach = max((len(stop.encode()) for stop in stops), default=0) + CHARACTER_BYTES
    rows = GrowingRows(model, prompts, sampling, tokenizer.vocab_size)
    added: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    while alive:
        going = []
        for index, (row, token) in enumerate(zip(alive, rows.grow(), strict=True)):
            if token == tokenizer.eot_token:
                continue
            added[row].append(token)
            tail = tokenizer.decode(added[row][-reach:]) if stops else ""
            if len(added[row]) < count and not any(stop in tail for stop in stops):
                going.append(index)
        if len(going) < len(alive):
            alive = [alive[index] for index in going]
            rows.keep(going)
    return added


def sample_tokens(
    model: GPTModel, prompt: Sequence[int], sampling: Sampling, vocab_size: int | None = None
) -> Iterator[int]:
    """Yield tokens that continue `prompt`, without end, even after an end-of-text token. Token ids of `vocab_size` or
    more are never chosen (None: all can be). Raises RunError if a logit is not finite."""
    rows = GrowingRows(model, [prompt], sampling, vocab_size)
    while True:
        yield from rows.grow()


class GrowingRows:
    """Rows of tokens that grow by a token at a time. The model sees the last `context_length` tokens of each row."""

    def __init__(
        self, model: GPTModel, prompts: Sequence[Sequence[int]], sampling: Sampling, vocab_size: int | None
    ) -> None:
        """Create one row from each of `prompts`. No prompt may be empty. Token ids of `vocab_size` or more are never
        chosen (None: all can be)."""
        self.model = model
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.rows = [list(prompt) for prompt in prompts]
        # Each row has a generator of its own, so that its tokens do not depend on the other rows.
        self.generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))]
        self.cache: KeyValueCache | None = KeyValueCache()

    def grow(self) -> list[int]:
        """Append a token to each row, and return these tokens. Raises RunError if a logit is not finite."""
        logits_BxV = self.next_logits()[:, : self.vocab_size].float().cpu()
        pairs = zip(logits_BxV, self.generators, strict=True)
        chosen = [choose(logits_V, self.sampling, generator) for logits_V, generator in pairs]
        for row, token in zip(self.rows, chosen, strict=True):
            row.append(token)
        return chosen

    def next_logits(self) -> Tensor:
        """Return the logits for each row's next token, (rows, vocabulary), on the model's device."""
        limit = self.model.config.context_length
        if max(map(len, self.rows)) > limit:
            self.cache = None  # from now on, the position of a token in the window changes with every step
        if self.cache is None:
            windows = [row[-limit:] for row in self.rows]
        else:
            seen = self.cache.lengths or [0] * len(self.rows)
            windows = [row[start:] for row, start in zip(self.rows, seen, strict=True)]
        lengths = [len(window) for window in windows]
        tokens_BxT = torch.tensor([[*window, *[0] * (max(lengths) - len(window))] for window in windows])
        with evaluating(self.model):
            tokens_BxT = tokens_BxT.to(next(self.model.parameters()).device)
            features_BxTxC = self.model.features(tokens_BxT, lengths, self.cache)
            return self.model.out_head(features_BxTxC[range(len(lengths)), [length - 1 for length in lengths]])

    def keep(self, indexes: list[int]) -> None:
        """Keep only the rows with these indexes, in this order."""
        self.rows = [self.rows[index] for index in indexes]
        self.generators = [self.generators[index] for index in indexes]
        if self.cache is not None and indexes:
            self.cache.keep(indexes)


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose a token id from a row of logits. Raises RunError if a logit is not finite."""
    if not torch.isfinite(logits_V).all():
        raise RunError(
            "the model's logits are not finite: its weights are broken, or its training diverged; use another "
            "checkpoint"
        )
    if sampling.temperature < COLDEST:
        return int(logits_V.argmax())
    if sampling.top_k is not None and sampling.top_k < len(logits_V):
        values, ids = logits_V.topk(sampling.top_k)
    else:
        values, ids = logits_V, torch.arange(len(logits_V))
    chances = torch.softmax(values / sampling.temperature, dim=-1)
    return int(ids[torch.multinomial(chances, 1, generator=generator)])


def prompts_of(file: Path | None, prompt: str | None, default: str) -> list[str]:
    """Return the prompts in `file` (--prompts), or else `prompt` (--prompt), or else `default`. Raises UserError if
    both options are given, or if the file is not valid."""
    if file is None:
        return [default if prompt is None else prompt]
    if prompt is not None:
        raise UserError("--prompt and --prompts: give one of them")
    prompts = []
    lines = read_text(file).split("\n")  # splitlines() would split at more characters
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        value = line.removesuffix("\r")
        if file.suffix == ".jsonl":
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = ""
            if not isinstance(value, str) or not value or not is_unicode(value):
                raise UserError(f'{file}: line {number}: must be a JSON string, valid Unicode, not empty: "like this"')
        prompts.append(value)
    if not prompts:
        raise UserError(f"{file}: no prompts; write one on each line")
    return prompts


def print_samples(
    model: GPTModel, tokenizer: Tokenizer, prompts: list[str], sampling: Sampling, *, samples: int, count: int
) -> None:
    """Print each prompt with `samples` continuations of up to `count` tokens. A single continuation is printed while it
    is computed. Raises UserError if a prompt cannot be encoded, and RunError if a logit is not finite."""
    encoded = [encode_prompt(model, tokenizer, prompt) for prompt in prompts]
    for number, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True), start=1):
        which = f"prompt {number} of {len(prompts)}" if len(prompts) > 1 else ""
        if samples > 1:
            added = continue_prompts(model, tokenizer, [tokens] * samples, count, sampling)
            for sample, more in enumerate(added, start=1):
                click.echo(f"--- {which}{', ' if which else ''}sample {sample} of {samples} ---")
                click.echo(escape_controls(tokenizer.decode(tokens + more)))
            continue
        if which:
            click.echo(f"--- {which} ---")
        click.echo(escape_controls(prompt), nl=False)
        drawn = islice(sample_tokens(model, tokens, sampling, tokenizer.vocab_size), count)
        for piece in tokenizer.decode_stream(takewhile(lambda token: token != tokenizer.eot_token, drawn)):
            click.echo(escape_controls(piece), nl=False)
        click.echo()
