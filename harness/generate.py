"""Sampling from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


@torch.no_grad()
def sample_tokens(
    model: nn.Module, prompt: list[int], *, temperature: float, top_k: int | None, seed: int
) -> Iterator[int]:
    """Yield tokens that continue `prompt`, without end; the model sees at most its context length of them.

    `temperature` 0 takes the likeliest token; otherwise the logits are divided by it and, with `top_k`, all but the k
    likeliest are left out. A generator of its own, seeded by `seed`, leaves the global random state alone.
    """
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    context: list[int] = list(prompt)
    limit: int = model.config.context_length  # type: ignore[assignment,union-attr]
    while True:
        was_training = model.training
        model.eval()
        window = torch.tensor([context[-limit:]], device=parameter.device)
        logits_V = model(window)[0, -1].float().cpu()
        model.train(was_training)
        token = choose(logits_V, temperature, top_k, generator)
        context.append(token)
        yield token


def choose(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token id drawn from a row of logits."""
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        values, ids = logits_V.topk(top_k)
    else:
        values, ids = logits_V, torch.arange(len(logits_V))
    chances = torch.softmax(values / temperature, dim=-1)
    return int(ids[torch.multinomial(chances, 1, generator=generator)])
