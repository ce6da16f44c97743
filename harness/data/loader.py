"""Microbatches of a split, numbered from 0 across all ranks and filled with windows in the order of order.py. The data
loader keeps no state between steps, so a run can resume at any step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from harness.common.errors import UserError
from harness.data.dataset import TokenFile
from harness.data.order import WindowOrder
from harness.data.training_data import JoinedTokens

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
        """Return the batch layouts of the steps after the run's first `tokens_seen` tokens.

        Each entry of `layouts` is (tokens, layout). A step has the layout of the last entry whose tokens the run has
        seen before that step. The entries are in ascending order, and the first one's tokens are 0.
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
        """Return the largest number of steps that read at most `tokens` tokens; 0 if `tokens` is negative."""
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

        `available` is the number of tokens from the starting token on, in all passes over the data. To read n input
        tokens, n + 1 must be available. Raises UserError if there are too few for `wanted` or, with -1, for one step.
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
    """Microbatch of B sequences. Each has T input tokens and one token more, because the targets are the inputs shifted
    by one."""

    windows: np.ndarray  # (B, T + 1) in the file's dtype
    # Number of windows, from the first one on, that count in an evaluation; the others only fill the microbatch. None:
    # all of them.
    counted: int | None = None

    @classmethod
    def consecutive(cls, tokens: np.ndarray, context_length: int) -> Microbatch:
        """Return the microbatch of the B consecutive windows in `tokens`, (B·T + 1,)."""
        return cls(sliding_window_view(tokens, context_length + 1)[::context_length])

    @property
    def targets(self) -> np.ndarray:
        return self.windows[:, 1:]

    def to(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, (B, T) int64 each, on `device`, which is the CPU or a CUDA GPU. The copy to a GPU
        is asynchronous."""
        import torch  # imported here, because commands that only inspect a dataset do not need torch

        tokens = torch.from_numpy(np.stack((self.windows[:, :-1], self.targets), dtype=np.int64))
        if device.type == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        return tokens[0], tokens[1]


@dataclass(frozen=True)
class TokenLoader:
    """Data loader that makes microbatches from windows of a split, or of the same split of several datasets."""

    tokens: TokenFile | JoinedTokens
    order: WindowOrder
    layout: BatchLayout  # world size, microbatch size and context length of all steps
    batches: BatchSchedule | None = None  # number of accumulation steps of each step; None: that of `layout`
    first_window: int = 0  # number, in `order`, of the first window of microbatch 0

    def starts(self, index: int) -> np.ndarray:
        """Return the positions in `self.tokens` at which the windows of microbatch number `index` begin: (B,) int64."""
        size = self.layout.microbatch_size
        return self.order.starts(self.first_window + index * size, size)

    def microbatch(self, index: int, *, windows: int | None = None) -> Microbatch:
        """Return microbatch number `index`. `windows` is the number of windows in all microbatches together; None: no
        limit. Copies of the last window fill up the last microbatch. Its `counted` excludes these copies."""
        length, starts, counted = self.layout.context_length, self.starts(index), None
        if windows is not None and windows < (index + 1) * len(starts):
            counted = windows - index * len(starts)
            starts[counted:] = starts[counted - 1]
        # The windows are not consecutive if a pass ends within the microbatch, or if copies fill it up.
        if self.order.is_front_to_back and starts[-1] - starts[0] == (len(starts) - 1) * length:
            return Microbatch.consecutive(self.tokens.read(int(starts[0]), len(starts) * length + 1), length)
        return Microbatch(np.stack([self.tokens.read(int(start), length + 1) for start in starts]), counted)

    def microbatches(self, steps_from_start: int, rank: int) -> list[Microbatch]:
        """Return the microbatches that `rank` reads in step `steps_from_start`; step 0 begins at `first_window`. If the
        order is not front to back, the windows of the rank's next step are read ahead."""
        # If the order is not front to back, a disk needs a seek for each window.
        if not self.order.is_front_to_back:
            for index in self._indexes(steps_from_start + 1, rank):
                self.tokens.read_ahead(self.starts(index), self.layout.context_length + 1)
        return [self.microbatch(index) for index in self._indexes(steps_from_start, rank)]

    def _indexes(self, steps_from_start: int, rank: int) -> range:
        """Return the numbers of the microbatches that `rank` reads in a step.

        In accumulation step a, the rank reads microbatch (n + a)·world_size + rank, where n is the number of
        accumulation steps in all earlier steps.
        """
        batches = self.batches or BatchSchedule.constant(self.layout)
        world_size, tokens_before = self.layout.world_size, batches.tokens_before(steps_from_start)
        n = tokens_before // (world_size * self.layout.microbatch_tokens)
        accumulation_steps = batches.at(steps_from_start).accumulation_steps
        return range(n * world_size + rank, (n + accumulation_steps) * world_size, world_size)
