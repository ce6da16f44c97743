"""Microbatches of a split for each rank: a split, from a starting token on, is a row of microbatches, and one formula
(`TokenLoader.microbatches`) says which of them a rank takes at a global step. Nothing else is remembered between steps,
so that a run can continue anywhere: the size of a step's batch follows from the tokens before it (`BatchSchedule`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.common.errors import UserError
from harness.data.dataset import TokenFile

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BatchLayout:
    """Layout of one optimizer step's tokens over ranks and accumulation steps."""

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
class Stage:
    """Steps that are alike in their batch: from `first_step` on, before which there are `tokens_before` tokens."""

    first_step: int
    tokens_before: int
    layout: BatchLayout


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch of every step from a starting token on. Steps and tokens count from there."""

    stages: tuple[Stage, ...]  # in order; the last has no end

    @classmethod
    def constant(cls, layout: BatchLayout) -> BatchSchedule:
        return cls((Stage(0, 0, layout),))

    @classmethod
    def ramp(cls, layouts: Sequence[tuple[int, BatchLayout]], tokens_seen: int) -> BatchSchedule:
        """Each layout holds for the steps that begin once so many tokens of the run have been seen; the schedule starts
        where `tokens_seen` have been."""
        current = max(index for index, (seen, _) in enumerate(layouts) if seen <= tokens_seen)
        stages = [Stage(0, 0, layouts[current][1])]
        for seen, layout in layouts[current + 1 :]:
            last = stages[-1]
            # Steps of the stage before until so many tokens have been seen; none if its last step went beyond them.
            steps = max(0, -(-(seen - tokens_seen - last.tokens_before) // last.layout.global_tokens))
            here = Stage(last.first_step + steps, last.tokens_before + steps * last.layout.global_tokens, layout)
            stages = [*(stages if steps else stages[:-1]), here]
        return cls(tuple(stages))

    def at(self, step: int) -> BatchLayout:
        """The batch of a step."""
        return self._stage(step).layout

    def tokens_before(self, step: int) -> int:
        """The tokens of all steps before this one."""
        stage = self._stage(step)
        return stage.tokens_before + (step - stage.first_step) * stage.layout.global_tokens

    def steps_within(self, tokens: int) -> int:
        """The largest number of steps that see at most so many tokens."""
        stages = self.stages
        stage = stages[max(0, bisect_right(stages, tokens, key=lambda stage: stage.tokens_before) - 1)]
        return stage.first_step + max(0, tokens - stage.tokens_before) // stage.layout.global_tokens

    def steps_for(self, tokens: int) -> int:
        """The smallest number of steps that see at least so many tokens."""
        steps = self.steps_within(tokens)
        return steps if self.tokens_before(steps) >= tokens else steps + 1

    def num_steps(self, wanted: int, available: int) -> int:
        """The smallest number of steps that see at least `wanted` tokens; -1 wanted: as many as there are tokens for.

        `available` counts the tokens in the file from the slice's start; one more than the steps see is needed, as the
        last target. Raises UserError saying how many tokens were wanted and how many there are.
        """
        steps = self.steps_within(available - 1) if wanted == -1 else self.steps_for(wanted)
        needed = self.tokens_before(max(steps, 1) if wanted == -1 else steps) + 1
        if available < needed:
            raise UserError(f"wanted {needed:,} tokens, but there are {max(0, available):,}")
        return steps

    def _stage(self, step: int) -> Stage:
        return self.stages[max(0, bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1)]


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
    """Consecutive microbatches of a split from a starting token, of one size; `batches` says how many of them a step
    takes, if that changes."""

    def __init__(
        self, tokens: TokenFile, start_token: int, layout: BatchLayout, batches: BatchSchedule | None = None
    ) -> None:
        self.tokens = tokens
        self.start_token = start_token
        self.layout = layout
        self.batches = batches or BatchSchedule.constant(layout)

    def microbatch(self, index: int) -> Microbatch:
        """Microbatch `index`, counted from the start token."""
        size = self.layout.microbatch_tokens
        return Microbatch(self.tokens.read(self.start_token + index * size, size + 1), self.layout.context_length)

    def microbatches(self, steps_from_start: int, rank: int) -> list[Microbatch]:
        """The microbatches of `rank` in the step that is `steps_from_start` after the one at the start token: in
        accumulation step a of A, microbatch (n + a)·world_size + rank, with n the accumulation steps before this step:
        steps_from_start·A, if A was the same in all of them."""
        size, tokens_before = self.layout.world_size, self.batches.tokens_before(steps_from_start)
        before = tokens_before // (size * self.layout.microbatch_tokens)
        steps = self.batches.at(steps_from_start).accumulation_steps
        return [self.microbatch((before + a) * size + rank) for a in range(steps)]
