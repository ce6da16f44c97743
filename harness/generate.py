"""Sampling from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from harness.errors import UserError
from harness.tokenizer import Tokenizer

COLDEST = 1e-4  # below it the division would overflow, and the likeliest token is all there is


@dataclass(frozen=True)
class Sampling:
    """How a next token is chosen: the likeliest at `temperature` 0, else drawn from the `top_k` likeliest (None: from
    all) with the logits divided by the temperature."""

    temperature: float = 1.0
    top_k: int | None = 25
    seed: int = 42


def continue_text(model: nn.Module, tokenizer: Tokenizer, prompt: str, count: int, sampling: Sampling) -> str:
    """The prompt and `count` tokens more. Raises UserError if the prompt is empty or the tokenizer another model's."""
    tokens = tokenizer.encode(prompt)
    vocab_size: int = model.config.vocab_size  # type: ignore[assignment,union-attr]
    if not tokens:
        raise UserError("the prompt is empty; give at least one character")
    if max(tokens) >= vocab_size:
        raise UserError(
            f"the prompt has token {max(tokens)}, beyond the model's vocabulary of {vocab_size}: the tokenizer is "
            "another model's (a checkpoint has its own beside its weights)"
        )
    tokens += islice(sample_tokens(model, tokens, sampling, tokenizer.vocab_size), count)
    return tokenizer.decode(tokens)


@torch.no_grad()
def sample_tokens(
    model: nn.Module, prompt: list[int], sampling: Sampling, vocab_size: int | None = None
) -> Iterator[int]:
    """Yield tokens that continue `prompt`, without end; the model sees at most its context length of them.

    Ids from `vocab_size` on (a padded head's) are never chosen. A generator of its own, seeded by the sampling's seed,
    leaves the global random state alone.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    context: list[int] = list(prompt)
    limit: int = model.config.context_length  # type: ignore[assignment,union-attr]
    while True:
        was_training = model.training
        model.eval()
        logits_V = model(torch.tensor([context[-limit:]], device=device))[0, -1, :vocab_size].float().cpu()
        model.train(was_training)
        token = choose(logits_V, sampling, generator)
        context.append(token)
        yield token


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id drawn from a row of logits."""
    if sampling.temperature < COLDEST:
        return int(logits_V.argmax())
    if sampling.top_k is not None and sampling.top_k < len(logits_V):
        values, ids = logits_V.topk(sampling.top_k)
    else:
        values, ids = logits_V, torch.arange(len(logits_V))
    chances = torch.softmax(values / sampling.temperature, dim=-1)
    return int(ids[torch.multinomial(chances, 1, generator=generator)])
