"""Trials of microbatches with real steps, and the search for the largest that fits, which asks for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.common.errors import RunError, UserError
from harness.common.memory import PeakMeter, is_out_of_memory, release_memory
from harness.common.statistics import fit_line
from harness.data.dataset import TokenFile
from harness.data.loader import Microbatch
from harness.distributed.world import World
from harness.evaluation.loss import microbatch_losses
from harness.model.determinism import explain_nondeterminism
from harness.training.step import OptimizerStep, StepResult

# The notebook's finding: on a GPU memory has settled after three steps. On the CPU, whose blocks go back at once, the
# second has all there is: the optimizer's state comes into being in the first.
PROBE_STEPS = {"cuda": 3, "cpu": 2}
SEARCH_SECONDS = 600.0  # on the CPU, where a probe may take minutes, none is begun that would end later
PROBE_ACCUMULATION = 2  # the second microbatch meets the first one's gradients; a third needs nothing more
GUESS_GROWTH = 4  # by so much further each guess after the second keeps from what is known


@dataclass(frozen=True)
class Found:
    """Result of a search: sequences in the largest microbatch that fits, 0 if none does, and a remark on it."""

    size: int
    remark: str = ""


class SearchTooLong(Exception):  # noqa: N818 - not an error
    """Ends a search whose next probe would take too long."""


@dataclass
class MicrobatchProbe:
    """Answers "does a microbatch of n fit?" by trying it, on every rank at once.

    The steps run on the bare model, without collectives: an out-of-memory on one rank cannot leave the others waiting
    in one. On several ranks gradients lie in the buckets of their exchange, which are there in every forward pass; the
    bare model has gradients there from the second microbatch on, so that two are tried even where training has one.
    DDP's second set of buckets, while it arranges them anew, is there when there are no activations.
    """

    build_step: Callable[[], OptimizerStep]
    world: World
    tokens: TokenFile
    start_token: int
    context_length: int
    accumulation_steps: int = 1
    validates: bool = True
    rehearse: Callable[[StepResult], None] = lambda result: None  # once, what else training does between two steps
    limit_bytes: float = math.inf
    largest_token: int = 2**32 - 1  # any beyond is taken for this one
    peaks: list[tuple[float, float]] = field(default_factory=list)  # (sequences, bytes) of what fitted
    largest: int = 0  # that fitted
    smallest_failed: int | None = None
    steps: int = 0  # of the optimizer, in all probes
    seconds_each: float = 0.0  # per sequence, in the last probe
    _step: OptimizerStep | None = None
    _rehearsed: bool = False
    _began: float = field(default_factory=time.monotonic)
    _meter: PeakMeter = field(init=False)

    def __post_init__(self) -> None:
        self._meter = PeakMeter(self.world.device)

    @property
    def seconds(self) -> float:
        """Since the search began."""
        return time.monotonic() - self._began

    def fits(self, microbatch_size: int) -> bool:
        """Try some steps; every rank's answer is the same. Raises SearchTooLong for a probe without an end."""
        self._announce(microbatch_size)
        began = time.monotonic()
        self._meter.begin()
        fitted = self.fits_here(microbatch_size)
        peak = self._meter.peak_bytes()
        if self.largest or not fitted:  # the first has compiled, imported and rehearsed
            self.seconds_each = (time.monotonic() - began) / microbatch_size
        # Outside the handler of the error, whose traceback holds the tensors that did not fit.
        release_memory(self.world.device)
        fits = self.world.all_true(fitted)
        if fits:
            self.largest = max(self.largest, microbatch_size)
        else:
            self.smallest_failed = min(self.smallest_failed or microbatch_size, microbatch_size)
        if fits and peak is not None:
            self.note_peak(microbatch_size, peak)
        if self.world.is_main:
            print(f"{self._label(microbatch_size)}: {self._verdict(fits=fits)}", flush=True)
        return fits

    def _label(self, microbatch_size: int) -> str:
        return f"microbatch {microbatch_size}"

    def _verdict(self, *, fits: bool) -> str:
        return "fits" if fits else "out of memory"

    def note_peak(self, microbatch_size: int, peak: int) -> None:
        """A microbatch has fitted, with so many bytes on this rank."""
        self.peaks.append((microbatch_size, peak))

    def _announce(self, microbatch_size: int) -> None:
        """Say what is tried next, and how long it will take, as far as that is known."""
        about = self.seconds_each * microbatch_size
        over = self.seconds + about > SEARCH_SECONDS and self.world.device.type == "cpu"
        if not self.world.all_true(not (over and self.largest)):
            raise SearchTooLong(f"trying {microbatch_size} would take about {about:,.0f} s")
        if self.world.is_main:
            print(f"trying {microbatch_size}{f', about {about:,.0f} s' if about else ''} ...", flush=True)

    def guess(self) -> int | None:
        """Estimate, by the line through the peaks, of the largest size that fits; the same on every rank.
        Collective."""
        return self.guess_by(self.memory_line())

    def guess_by(self, line: tuple[float, float] | None) -> int | None:
        """Estimate, by the line (bytes per sequence, fixed bytes), of the largest size that fits on every rank; None if
        unknown. Collective."""
        own = (self.limit_bytes - line[1]) / line[0] if line and line[0] > 0 else 0.0
        return min(self.world.gather(int(own) if 0 < own < 2**31 else 0)) or None

    def fits_here(self, microbatch_size: int) -> bool:
        """True if this rank has the memory for training steps and, tried once, for the work between two steps."""
        try:
            if self._step is None:
                self._step = self.build_step()
            meets_gradients = self.world.size > 1 or self.accumulation_steps > 1
            window = self._window(microbatch_size)
            self._train(self._step, [window] * (PROBE_ACCUMULATION if meets_gradients else 1))
        except (RuntimeError, MemoryError, OSError, ImportError, RunError) as error:
            if is_out_of_memory(error):
                if self._step is not None:
                    self._step.forget_gradients()  # which the next size would have to fit beside
                return False
            if explained := explain_nondeterminism(error):
                raise UserError(explained) from None
            raise
        return True

    def _train(self, step: OptimizerStep, microbatches: Sequence[Microbatch]) -> None:
        """Real steps, and what comes between them, until all of it is done on the device, too."""
        self._rehearse_once(self._run(step, microbatches, 1))
        if self.validates:
            microbatch_losses(step.model, microbatches[:1], step.precision)
        self._run(step, microbatches, PROBE_STEPS[self.world.device.type] - 1)

    def _run(self, step: OptimizerStep, microbatches: Sequence[Microbatch], count: int) -> StepResult:
        """So many steps that change nothing; waits for the device, where an error would come up."""
        for _ in range(count):
            result = step.run(microbatches, multiplier=0.0)
            self.steps += 1
        result.losses_A.tolist()
        return result

    def _rehearse_once(self, result: StepResult) -> None:
        if not self._rehearsed:
            self.rehearse(result)
            self._rehearsed = True

    def _window(self, microbatch_size: int) -> Microbatch:
        tokens = self.tokens.read(self.start_token, microbatch_size * self.context_length + 1)
        return Microbatch(np.minimum(tokens, min(self.largest_token, np.iinfo(tokens.dtype).max)), self.context_length)

    def memory_line(self) -> tuple[float, float] | None:
        """Bytes per sequence and fixed bytes, fitted to the peaks; None if fewer than two sizes fitted."""
        return fit_line(self.peaks)

    def describe(self) -> str:
        """Steps and seconds of the search, in words."""
        return f"{self.steps} steps, {self.seconds:,.0f} s"


def largest_that_fits(
    fits: Callable[[int], bool],
    ceiling: int,
    guess: Callable[[], int | None] = lambda: None,
    *,
    first: int = 1,
    growth: int = 2,
    fineness: float = math.inf,
    most: float = math.inf,
) -> int:
    """Return the largest n of 1 .. ceiling for which `fits(n)`, or 0: grow until one does not fit, then bisect.

    `fits` must be true up to some n and false beyond; it is asked about each n at most once, and never about more than
    `growth` times what fits. Sizes below `first` are taken to fit. The answer may be too small by its `fineness`-th
    part, if that is more than nothing, and by more after `most` questions.

    `guess` may say, from what was measured so far, what the answer will be. The guess is tried, then its neighbour,
    then what is 4, 16, ... away from the known sizes, up to the middle; a guess that is further off than that is not
    believed. So a right guess ends the search, and wrong ones add at most two questions and half of bisecting's.
    """
    good, bad, asked, guesses = first - 1, ceiling + 1, 0, 0
    while bad - good > max(1, good // fineness) and asked < most:
        guessed, distance = guess(), GUESS_GROWTH ** max(0, guesses - 1)
        attempt, beyond, largest_guess = (good + bad) // 2, bad, bad + distance
        if bad > ceiling:
            attempt = min(growth * good if good >= first else first, ceiling)
            beyond, largest_guess = attempt + 1, attempt - 1
        if guessed is not None and good - distance <= guessed <= largest_guess and beyond - good >= 2 * distance:
            attempt = min(max(guessed, good + distance), beyond - distance)
            guesses += 1
        asked += 1
        if fits(attempt):
            good = attempt
        else:
            bad = attempt
    return good
