"""Search for the largest microbatch that fits, for a model that training compiles.

Compiling takes the better part of a minute, and torch.compile would do it for every size. So the sizes are tried with
one program in which the number of sequences is a variable; the line through its peaks is what is reported. What it
finds is tried once more with the program that training itself will use, which is compiled for just this size. If it
does not fit there, a somewhat smaller size is tried in the same way. If large sizes need a program of their own (on the
CPU, Inductor sums more than 4,096 numbers in another way; from 2**31 on, indices are wider), the search goes on with
that one, and there is only one to confirm with: three programs of the model at most.

Validation is not tried: it holds, at each point of its forward pass, no more than training holds there, and training
goes on to hold all layers' activations at once.

What a search takes, by count, for the 163M model on a card that trains 400,000 tokens/s (2.6 ms a sequence of 1,024
tokens) and holds 375 sequences, at 30 s a compilation: at most three compilations, 90 s; MOST_PROBES steps of two
microbatches, of which the first four (2, 8, 32, 128) are small, at most 9 * 2 * 0.98 = 18 s; twice CONFIRMING_STEPS
steps, 8 s: 116 s. When the first size that is confirmed fits, as is expected, two compilations and about six
probes: 75 s. Ranks search at the same time, so that eight take no longer than one. All but the counts is assumed.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import RecompileError, TorchDynamoException

from harness.common.errors import UserError
from harness.common.memory import release_memory
from harness.common.statistics import fit_line
from harness.data.loader import Microbatch
from harness.training.compilation import explain_failed_compilation
from harness.training.microbatch_probe import Found, MicrobatchProbe, SearchTooLong, largest_that_fits
from harness.training.step import OptimizerStep

MOST_PROGRAMS = 3
MOST_PROBES = 13
PROBE_STEPS, CONFIRMING_STEPS = 1, 2
STEP_DOWN = 16  # by this part, if training's own program takes more than the search's


class AnyNumber(Microbatch):
    """A microbatch for a program that takes any number of sequences."""

    def to(self, device: torch.device) -> tuple[Tensor, Tensor]:
        inputs_BxT, targets_BxT = super().to(device)
        for tensor in (inputs_BxT, targets_BxT):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return inputs_BxT, targets_BxT


class TooManyPrograms(Exception):  # noqa: N818 - not an error
    """Ends a search that would compile another program."""


@dataclass
class CompiledProbe(MicrobatchProbe):
    """A probe whose sizes share a program; `confirm` has training's own."""

    programs: int = 0  # of the model, compiled so far on the rank that has most
    is_confirming: bool = False
    backend: Any = "inductor"  # torch.compile's
    rough_peaks: list[tuple[float, float]] = field(default_factory=list)  # like `peaks`, of any program of the search
    _measured_program: int = 0  # whose peaks are in `peaks`
    _needs_program: bool = False
    _search_code: types.CodeType | None = None

    def fits(self, microbatch_size: int) -> bool:
        """Try a size as MicrobatchProbe does. Raises TooManyPrograms if the search would need a third program for
        that."""
        failed, programs, seconds = self.smallest_failed, self.programs, self.seconds_each
        with never_uncompiled(may_compile=self.is_confirming or self.programs < MOST_PROGRAMS - 1):
            fitted = super().fits(microbatch_size)
        if not self.world.all_true(not self._needs_program):
            self.smallest_failed, self._needs_program = failed, False
            raise TooManyPrograms
        self.programs = max(self.world.gather(self._programs_here()))
        if self.programs > programs:  # compiling says nothing of how long the next size will take
            self.seconds_each = seconds
        return fitted

    def fits_here(self, microbatch_size: int) -> bool:
        try:
            return super().fits_here(microbatch_size)
        except RecompileError:
            self._needs_program = True
            return False
        except TorchDynamoException as error:
            raise UserError(str(explain_failed_compilation(error))) from None

    def _verdict(self, *, fits: bool) -> str:
        return "would need another program" if self._needs_program else super()._verdict(fits=fits)

    def confirm(self, microbatch_size: int) -> bool:
        """True if this size fits as training compiles it, for just this size. Collective."""
        self.is_confirming = True
        return self.fits(microbatch_size)

    def by_line(self, ceiling: int) -> int:
        """The size that fits by the line through all peaks of the search, or the largest that has fitted, without a
        trial."""
        beyond = self.smallest_failed or ceiling + 1
        return max(1, self.largest, min(self.guess() or 0, beyond - 1))

    def guess(self) -> int | None:
        return self.guess_by(self.memory_line() or fit_line(self.rough_peaks))

    def describe(self) -> str:
        return f"the model was compiled {self.programs} times; {super().describe()}"

    def _announce(self, microbatch_size: int) -> None:
        if not self.is_confirming:
            super()._announce(microbatch_size)
        elif self.world.is_main:
            print(f"trying {microbatch_size} as training compiles it ...", flush=True)

    def _label(self, microbatch_size: int) -> str:
        return super()._label(microbatch_size) + (" as training compiles it" if self.is_confirming else "")

    def note_peak(self, microbatch_size: int, peak: int) -> None:
        if self.is_confirming:
            return
        self.rough_peaks.append((microbatch_size, peak))
        if self._programs_here() != self._measured_program:  # what is reported is the line of one program
            self.peaks.clear()
        self._measured_program = self._programs_here()
        super().note_peak(microbatch_size, peak)

    def _train(self, step: OptimizerStep, microbatches: Sequence[Microbatch]) -> None:
        if self.is_confirming:
            step.model = step.bare_model
            self._rehearse_once(self._run(step, microbatches, CONFIRMING_STEPS))
            return
        if self._search_code is None:
            step.model, self._search_code = compiled_for_any_number(step.bare_model, self.backend)
        windows = [AnyNumber(each.tokens, each.context_length) for each in microbatches]
        if not self._rehearsed:  # compiles, and brings the optimizer's state into being: not what is to be measured
            self._rehearse_once(self._run(step, windows, 1))
            release_memory(self.world.device)
            self._meter.begin()
        self._run(step, windows, PROBE_STEPS)

    def _programs_here(self) -> int:
        codes = [self._search_code] if self._search_code else []
        if self._step is not None:
            codes.append(type(self._step.bare_model).forward.__code__)
        return sum(len(_debug_get_cache_entry_list(code)) for code in codes)


def compiled_for_any_number(model: nn.Module, backend: Any) -> tuple[Any, types.CodeType]:
    """A function that computes what `model` does, compiled, and its code, by which its programs are known.

    A function of its own, so that what is compiled for it is not taken for the model itself, nor the other way round.
    """

    def forward(inputs_BxT: Tensor, targets_BxT: Tensor) -> Tensor:
        return model.forward(inputs_BxT, targets_BxT)

    return torch.compile(forward, backend=backend), forward.__code__


def never_uncompiled(*, may_compile: bool) -> AbstractContextManager[object]:
    """Let each size that is not marked have a program of its own, as the first in a training run has, and no size be
    computed without a compiled program because there are many. RecompileError for one that needs another, unless it
    `may_compile`."""
    return dynamo_config.patch(
        automatic_dynamic_shapes=False, fail_on_recompile_limit_hit=True, error_on_recompile=not may_compile
    )


def find_compiled(probe: CompiledProbe, ceiling: int) -> Found:
    """The largest microbatch that fits, with at most MOST_PROGRAMS programs of the model. Collective."""
    size, remark = 1, ""
    try:
        if ceiling > 1:  # one sequence would be a program of its own; where many fit, a few more are the reserve's
            size = largest_that_fits(probe.fits, ceiling, probe.guess, first=2, growth=4, fineness=64, most=MOST_PROBES)
    except TooManyPrograms:
        size = probe.by_line(ceiling)
    except SearchTooLong as reason:
        size, remark = probe.largest, f"More may fit; the search has ended, since {reason}"
    while probe.programs < MOST_PROGRAMS:
        if probe.confirm(size):
            return Found(size, remark)
        if size == 1:
            return Found(0)
        size -= max(1, size // STEP_DOWN)
    return Found(size, "It was not tried as training compiles it: larger ones have not fitted so")
