"""Which tokens a rank trains on: a split, from a starting token on, is a row of microbatches, and one formula
(`TokenLoader.microbatches`) says which of them a rank takes at a global step. Nothing else is remembered between steps,
so that a run can continue anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.common.errors import UserError
from harness.data.dataset import TokenFile

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BatchLayout:
    """How one optimizer step's tokens are spread over ranks and accumulation steps."""

    world_size: int
    accumulation_steps: int
    microbatch_size: int
    context_length: int

    @property
    def microbatch_tokens(self) -> int:
        return self.microbatch_size * self.context_length

    @property
    def global_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.world_size * self.accumulation_steps * self.microbatch_tokens


@dataclass(frozen=True)
class Microbatch:
    """A microbatch as it lies in the file: B·T tokens and one more, since targets are inputs shifted by one."""

    tokens: np.ndarray
    context_length: int

    def to(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, (B, T) each, as int64 on `device`."""
        import torch  # here, since looking into a dataset does without it

        tokens = torch.from_numpy(self.tokens.astype(np.int64))
        if device.type == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        return tokens[:-1].view(-1, self.context_length), tokens[1:].view(-1, self.context_length)


class TokenLoader:
    """Consecutive microbatches of a split from a starting token."""

    def __init__(self, tokens: TokenFile, start_token: int, layout: BatchLayout) -> None:
        self.tokens = tokens
        self.start_token = start_token
        self.layout = layout

    def microbatch(self, index: int) -> Microbatch:
        """Microbatch `index`, counted from the start token."""
        size = self.layout.microbatch_tokens
        return Microbatch(self.tokens.read(self.start_token + index * size, size + 1), self.layout.context_length)

    def microbatches(self, steps_from_start: int, rank: int) -> list[Microbatch]:
        """What `rank` trains on in the step that is so many after the one at the start token: in accumulation step a of
        A, microbatch (steps_from_start·A + a)·world_size + rank."""
        steps, size = self.layout.accumulation_steps, self.layout.world_size
        return [self.microbatch((steps_from_start * steps + a) * size + rank) for a in range(steps)]


def num_whole_batches(wanted: int, available: int, batch_tokens: int) -> int:
    """The smallest whole number of batches that holds at least `wanted` tokens; -1 wanted: as many as there are.

    `available` counts the tokens in the file from the slice's start; one more than the batches is needed, as the last
    target. Raises UserError saying how many tokens were wanted and how many there are.
    """
    if wanted == -1:
        batches = max(0, available - 1) // batch_tokens
        needed = batch_tokens + 1
    else:
        batches = -(-wanted // batch_tokens)  # rounded up, in whole numbers: exact beyond 2**53, too
        needed = batches * batch_tokens + 1
    if available < needed:
        raise UserError(f"wanted {needed:,} tokens, but there are {max(0, available):,}")
    return batches
