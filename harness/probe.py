"""Trying microbatch sizes on the device: whole optimizer steps until memory runs out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from harness.errors import RunError, UserError
from harness.experiment import Experiment
from harness.files import replace_text
from harness.memory import GIB, PeakMeter, is_out_of_memory, limit_memory, release_memory, room_gib
from harness.microbatch import fit_line, largest_that_fits
from harness.step import TrainStep
from harness.tokens import Dataset, TokenFile, Window
from harness.world import World

PROBE_STEPS = 3  # the notebook's finding: memory has settled after three steps
PROBE_ACCUMULATION = 2  # a second microbatch meets the gradients of the first; a third needs nothing more


@dataclass
class MicrobatchProbe:
    """Answers "does a microbatch of n fit?" by trying it, on every rank at once.

    The steps run on the bare model, without collectives: an out-of-memory on one rank cannot leave the others waiting
    in one.
    """

    build_step: Callable[[], TrainStep]
    world: World
    tokens: TokenFile
    start_token: int
    context_length: int
    accumulation_steps: int = 1
    peaks: list[tuple[int, int]] = field(default_factory=list)  # (sequences, bytes) of what fitted
    _step: TrainStep | None = None

    def fits(self, microbatch_size: int) -> bool:
        """Try `PROBE_STEPS` steps; the verdict is every rank's."""
        meter = PeakMeter(self.world.device)
        fitted = self._try(microbatch_size)
        peak = meter.peak_bytes()
        # Outside the handler of the error, whose traceback holds the tensors that did not fit.
        release_memory(self.world.device)
        verdict = self.world.agree(fitted)
        if verdict and peak is not None:
            self.peaks.append((microbatch_size, peak))
        if self.world.is_main:
            print(f"microbatch {microbatch_size}: {'fits' if verdict else 'out of memory'}", flush=True)
        return verdict

    def _try(self, microbatch_size: int) -> bool:
        try:
            if self._step is None:
                self._step = self.build_step()
            windows = [self._window(microbatch_size)] * min(self.accumulation_steps, PROBE_ACCUMULATION)
            for _ in range(PROBE_STEPS):
                result = self._step.run(windows, multiplier=0.0)
            result.losses_A.tolist()  # waits for the device, where the error would come up
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def _window(self, microbatch_size: int) -> Window:
        tokens = self.tokens.read(self.start_token, microbatch_size * self.context_length + 1)
        return Window(np.ascontiguousarray(tokens), self.context_length)

    def memory_line(self) -> tuple[float, float] | None:
        """Bytes per sequence and fixed bytes, fitted to the peaks; None if fewer than two sizes fitted."""
        return fit_line([(float(size), float(peak)) for size, peak in self.peaks])


def search_microbatch(
    experiment: Experiment,
    world: World,
    dataset: Dataset,
    build_step: Callable[[], TrainStep],
    memory_limit_gib: float | None,
) -> int:
    """Find and print the largest microbatch that fits, with nothing but the train split as its ceiling.

    Raises RunError if not even one sequence fits.
    """
    config, context_length = experiment.config, experiment.model.context_length
    tokens = dataset.split("train")
    accumulation = PROBE_ACCUMULATION if config.global_batch_size is not None else config.gradient_accumulation_steps
    probe = MicrobatchProbe(build_step, world, tokens, config.start_train_token, context_length, accumulation)
    per_sequence = world.size * config.gradient_accumulation_steps * context_length
    ceiling = (len(tokens) - config.start_train_token - 1) // per_sequence
    if ceiling < 1:
        raise UserError(
            f"the train split of {config.dataset} is too short for one global batch: wanted "
            f"{config.start_train_token + per_sequence + 1:,} tokens, but there are {len(tokens):,}"
        )
    limit = limit_memory(world.device, memory_limit_gib, world.local_size)
    if not world.agree(room_gib(world.device, limit) > 0):
        raise world.verdict(f"the program alone takes the {limit:.2f} GiB; raise --memory-limit-gib")
    found = largest_that_fits(probe.fits, ceiling)
    if not found:
        raise world.verdict(f"not even a microbatch of 1 fits in {limit:.2f} GiB; use a smaller model or context")
    if world.is_main:
        print(f"Max microbatch size was {found}")
        ceiling_note = ", limited by the data" if found == ceiling else ""
        line = probe.memory_line()
        fit = (
            f"{line[0] / GIB:.3f} GiB per sequence + {line[1] / GIB:.3f} GiB fixed" if line else "too few sizes to tell"
        )
        print(f"Memory: {fit} (from {len(probe.peaks)} peaks; limit {limit:.2f} GiB{ceiling_note})", flush=True)
    return found


def write_microbatch_size(experiment: Experiment, found: int, world_size: int) -> int:
    """Put the largest usable microbatch of at most `found` into train.json; that number.

    With a `global_batch_size` a usable one divides it evenly over the ranks. Raises RunError if there is none.
    """
    path, wanted = experiment.run.train_json, experiment.config.global_batch_size
    size = found
    if wanted is not None:
        size = next((n for n in range(found, 0, -1) if wanted % (n * world_size) == 0), 0)
        if not size:
            raise RunError(f"{path}: no microbatch divides global_batch_size {wanted} over {world_size} ranks")
    text = path.read_text(encoding="utf-8")
    pattern = r'("(?:micro|mini)batch_size"\s*:\s*)\d+'
    replace_text(path, re.sub(pattern, lambda match: match.group(1) + json.dumps(size), text, count=1))
    return size
