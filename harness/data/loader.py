"""Microbatches of a split for each rank. From a starting token on, a split is a sequence of microbatches, and one
formula (`TokenLoader.microbatches`) gives the microbatches that a rank reads at a global step. The data loader keeps no
state between steps, so a run can resume at any step. If the global batch size changes during a run, the size at a step
depends only on the number of tokens before that step (`BatchSchedule`).
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
    """Division of one optimizer step's tokens among ranks, accumulation steps and sequences. `microbatch_size` is in
    sequences, `context_length` in tokens."""

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
    """Consecutive steps with the same batch layout, from step `first_step` on. All steps before `first_step` together
    read `tokens_before` tokens."""

    first_step: int
    tokens_before: int
    layout: BatchLayout


@dataclass(frozen=True)
class BatchSchedule:
    """Batch layout of every step from a starting token on. Steps and tokens are counted from that starting token."""

    stages: tuple[Stage, ...]  # in order of their steps; the last stage has no end

    @classmethod
    def constant(cls, layout: BatchLayout) -> BatchSchedule:
        return cls((Stage(0, 0, layout),))

    @classmethod
    def ramp(cls, layouts: Sequence[tuple[int, BatchLayout]], tokens_seen: int) -> BatchSchedule:
        """Return the schedule of a run that has seen `tokens_seen` tokens at the schedule's start.

        Each entry of `layouts` is (tokens, layout): the layout applies to steps that begin when the run has seen at
        least `tokens` tokens. The entries are in ascending order of tokens, and the first entry's tokens are 0.
        """
        current = max(index for index, (seen, _) in enumerate(layouts) if seen <= tokens_seen)
        stages = [Stage(0, 0, layouts[current][1])]
        for seen, layout in layouts[current + 1 :]:
            last = stages[-1]
            # Number of steps of the previous stage until the run has seen `seen` tokens. If the run has already seen
            # them when the previous stage begins, the number is 0, and the new stage replaces the previous one.
            steps = max(0, -(-(seen - tokens_seen - last.tokens_before) // last.layout.global_tokens))
            here = Stage(last.first_step + steps, last.tokens_before + steps * last.layout.global_tokens, layout)
            stages = [*(stages if steps else stages[:-1]), here]
        return cls(tuple(stages))

    def at(self, step: int) -> BatchLayout:
        """Return the batch layout of a step."""
        return self._stage(step).layout

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens read by all steps before `step`."""
        stage = self._stage(step)
        return stage.tokens_before + (step - stage.first_step) * stage.layout.global_tokens

    def steps_within(self, tokens: int) -> int:
        """Return the largest number of steps that read at most `tokens` tokens."""
        stages = self.stages
        stage = stages[max(0, bisect_right(stages, tokens, key=lambda stage: stage.tokens_before) - 1)]
        return stage.first_step + max(0, tokens - stage.tokens_before) // stage.layout.global_tokens

    def steps_for(self, tokens: int) -> int:
        """Return the smallest number of steps that read at least `tokens` tokens."""
        steps = self.steps_within(tokens)
        return steps if self.tokens_before(steps) >= tokens else steps + 1

    def num_steps(self, wanted: int, available: int) -> int:
        """Return the smallest number of steps that read at least `wanted` tokens. If `wanted` is -1, return the largest
        number of steps for which there are enough tokens.

        `available` is the number of tokens in the file from the starting token on. The steps need one token more than
        they read as inputs, because the last input's target is the token after it. Raises UserError with the needed and
        the available number if there are too few tokens or, for -1, too few for one step.
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
    """Microbatch of B sequences of T tokens, kept as B·T + 1 consecutive tokens of a token file. The extra token is
    the last target, because targets are inputs shifted by one."""

    tokens: np.ndarray  # (B·T + 1,) in the file's dtype
    context_length: int

    def to(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, (B, T) int64 each, on `device`. The copy to a GPU is asynchronous."""
        import torch  # imported here, because commands that only inspect a dataset do not need torch

        tokens = torch.from_numpy(self.tokens.astype(np.int64))
        if device.type == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        return tokens[:-1].view(-1, self.context_length), tokens[1:].view(-1, self.context_length)


class TokenLoader:
    """Data loader of a split: consecutive microbatches of one size from a starting token on.

    `batches` gives each step's batch layout if the number of accumulation steps changes during the run. World size,
    microbatch size and context length are always those of `layout`.
    """

    def __init__(
        self, tokens: TokenFile, start_token: int, layout: BatchLayout, batches: BatchSchedule | None = None
    ) -> None:
        self.tokens = tokens
        self.start_token = start_token
        self.layout = layout
        self.batches = batches or BatchSchedule.constant(layout)

    def microbatch(self, index: int) -> Microbatch:
        """Return microbatch number `index`. Microbatch 0 begins at the starting token. The file must have all of the
        microbatch's tokens."""
        size = self.layout.microbatch_tokens
        return Microbatch(self.tokens.read(self.start_token + index * size, size + 1), self.layout.context_length)

    def microbatches(self, steps_from_start: int, rank: int) -> list[Microbatch]:
        """Return the microbatches that `rank` reads in step `steps_from_start`, counted from the starting token.

        In accumulation step a, the rank reads microbatch (n + a)·world_size + rank, where n is the number of
        accumulation steps in all earlier steps: steps_from_start·A if every step has A accumulation steps.
        """
        world_size, tokens_before = self.layout.world_size, self.batches.tokens_before(steps_from_start)
        n = tokens_before // (world_size * self.layout.microbatch_tokens)
        accumulation_steps = self.batches.at(steps_from_start).accumulation_steps
        return [self.microbatch((n + a) * world_size + rank) for a in range(accumulation_steps)]
