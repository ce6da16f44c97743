"""The largest microbatch that fits into a device's memory (ddp_train.py -f).

`report_max_microbatch` is what the command does. `find_max_microbatch` searches: sizes are doubled until one does not
fit, then bisected, with guesses from the memory that was measured so far. Each size is tried by a `MicrobatchProbe`:
real steps of the run's model on its own data, under a limit, on all ranks at once, and the first time also all that
training does between two steps (harness/training/rehearsal.py).
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from harness.common.errors import RunError, UserError
from harness.common.files import replace_text
from harness.common.memory import (
    HEADROOM_BYTES,
    PeakMeter,
    is_out_of_memory,
    limit_memory,
    program_gib,
    release_memory,
    room_gib,
    settle_cpu_memory,
)
from harness.common.statistics import fit_line
from harness.common.units import GIB
from harness.data.dataset import Dataset, TokenFile, check_token_ids
from harness.data.loader import Microbatch
from harness.distributed.world import World
from harness.evaluation.loss import microbatch_losses
from harness.runs.experiment import Experiment
from harness.training.rehearsal import Rehearsal, RehearsedTrainer
from harness.training.startup import fetch_dataset, remark_on_machine, say
from harness.training.step import OptimizerStep, StepResult

GUESSES = 4  # of a search by the memory that was measured; after them it goes by halves alone
# The notebook's finding: on a GPU memory has settled after three steps. On the CPU, whose blocks go back at once, the
# second has all there is: the optimizer's state comes into being in the first.
PROBE_STEPS = {"cuda": 3, "cpu": 2}
SEARCH_SECONDS = 600.0  # on the CPU, where a probe may take minutes, none is begun that would end later
PROBE_ACCUMULATION = 2  # a second microbatch meets the gradients of the first; a third needs nothing more

# Builds, for one process, what trains an experiment on a dataset and leaves its results in a folder.
BuildTrainer = Callable[[Experiment, Dataset, Path, World], RehearsedTrainer]


def report_max_microbatch(
    experiment: Experiment, build_trainer: BuildTrainer, memory_limit_gib: float | None, *, write: bool
) -> None:
    """Find and print the largest microbatch that fits, under a limit if one is given; with `write`, put it into
    train.json. Collective.

    Raises RunError if not even one sequence fits, UserError for data that does not fit the run.
    """
    world = World.join()
    remark_on_machine(experiment, world)
    dataset = fetch_dataset(world, experiment.datasets_dir, experiment.config.dataset, experiment.splits)
    world.on_each_node(lambda: check_token_ids(dataset, "train", experiment.model.vocab_size))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as first:
        tiny = experiment.tiny()
        load_libraries(tiny, world, dataset, Rehearsal(world, partial(build_trainer, tiny, dataset, Path(first))))
        rehearsal = Rehearsal(world, partial(build_trainer, experiment, dataset, Path(folder)))
        found = find_max_microbatch(experiment, world, dataset, rehearsal, memory_limit_gib)
    remark_on_validation(experiment, found, world, dataset)
    if write:
        written = world.on_rank0(lambda: write_microbatch_size(experiment, found, world.size))
        say(world, f"{experiment.run.train_json}: microbatch_size is now {written}")
    world.leave()


def find_max_microbatch(
    experiment: Experiment,
    world: World,
    dataset: Dataset,
    rehearsal: Rehearsal,
    memory_limit_gib: float | None,
) -> int:
    """Find and print the largest microbatch that fits, with nothing but the train split as its ceiling.

    Raises RunError if not even one sequence fits.
    """
    config = experiment.config
    ceiling = largest_with_data(experiment, world, dataset)
    limit = limit_memory(world.device, memory_limit_gib, world.local_size)
    refuse_small_limit(world, limit)
    probe = MicrobatchProbe(
        rehearsal.build_step,
        world,
        dataset.split("train"),
        config.start_train_token,
        experiment.model.context_length,
        PROBE_ACCUMULATION if config.global_batch_size is not None else config.gradient_accumulation_steps,
        validates=config.validates,
        rehearse=rehearsal.rehearse,
        limit_bytes=limit * GIB - (0 if world.device.type == "cuda" else HEADROOM_BYTES),
    )
    too_long = ""
    try:
        found = largest_that_fits(probe.fits, ceiling, probe.guess)
    except SearchTooLong as reason:
        found, too_long = probe.largest, str(reason)
    if not found:
        raise world.collective_error(
            f"not even a microbatch of 1 fits in {limit:.2f} GiB; use a smaller model or context"
        )
    if world.is_main:
        print(f"Max microbatch size was {found}")
        if too_long:
            print(f"More may fit; the search has ended, since {too_long}")
        if config.benchmark_tasks is not None:
            print("Not counted: the memory of benchmarks while training")
        print(f"Memory: {describe_memory(probe, limit, is_all_data=found == ceiling)}", flush=True)
    return found


def describe_memory(probe: MicrobatchProbe, limit_gib: float, *, is_all_data: bool) -> str:
    """What a sequence takes, and how that is known."""
    note = ", limited by the data" if is_all_data else ""
    if probe.world.device.type == "cpu":
        note = f", of which {HEADROOM_BYTES / GIB:.2f} GiB are left as a reserve{note}"
    line = probe.memory_line()
    fit = f"{line[0] / GIB:.3f} GiB per sequence + {line[1] / GIB:.3f} GiB fixed" if line else "too few sizes to tell"
    return f"{fit} (from {len(probe.peaks)} peaks; limit {limit_gib:.2f} GiB{note})"


def largest_that_fits(fits: Callable[[int], bool], ceiling: int, guess: Callable[[], int | None] = lambda: None) -> int:
    """The largest n of 1 .. ceiling for which `fits(n)`, or 0: doubles until one does not fit, then bisects.

    `fits` must be true up to some n and false beyond; it is asked about each n at most once, and never about more than
    twice what fits. `guess` may say, from what was measured so far, what the answer will be: it and its neighbour are
    then tried first, and a few wrong guesses do no harm.
    """
    good, bad, guesses = 0, ceiling + 1, GUESSES
    while bad - good > 1:
        attempt = (good + bad) // 2 if bad <= ceiling else max(1, min(2 * good, ceiling))
        guessed = guess() if guesses else None
        if guessed is not None and (guessed < attempt or bad <= ceiling):
            guesses -= 1
            attempt = min(max(guessed, good + 1), bad - 1, max(1, 2 * good))
        if fits(attempt):
            good = attempt
        else:
            bad = attempt
    return good


class SearchTooLong(Exception):  # noqa: N818 - not an error
    """Ends a search whose next probe would take too long."""


@dataclass
class MicrobatchProbe:
    """Answers "does a microbatch of n fit?" by trying it, on every rank at once.

    The steps run on the bare model, without collectives: an out-of-memory on one rank cannot leave the others waiting
    in one.
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
    peaks: list[tuple[int, int]] = field(default_factory=list)  # (sequences, bytes) of what fitted
    largest: int = 0  # that fitted
    seconds_each: float = 0.0  # per sequence, in the last probe
    _step: OptimizerStep | None = None
    _rehearsed: bool = False
    _began: float = field(default_factory=time.monotonic)

    def fits(self, microbatch_size: int) -> bool:
        """Try `PROBE_STEPS` steps; every rank's answer is the same. Raises SearchTooLong for a probe without an end."""
        self._announce(microbatch_size)
        meter, began = PeakMeter(self.world.device), time.monotonic()
        fitted = self.fits_here(microbatch_size)
        peak = meter.peak_bytes()
        if self.largest or not fitted:  # the first has compiled, imported and rehearsed
            self.seconds_each = (time.monotonic() - began) / microbatch_size
        # Outside the handler of the error, whose traceback holds the tensors that did not fit.
        release_memory(self.world.device)
        fits = self.world.all_true(fitted)
        if fits:
            self.largest = microbatch_size
        if fits and peak is not None:
            self.peaks.append((microbatch_size, peak))
        if self.world.is_main:
            print(f"microbatch {microbatch_size}: {'fits' if fits else 'out of memory'}", flush=True)
        return fits

    def _announce(self, microbatch_size: int) -> None:
        """Say what is tried next, and how long it will take, as far as that is known."""
        about = self.seconds_each * microbatch_size
        over = time.monotonic() - self._began + about > SEARCH_SECONDS and self.world.device.type == "cpu"
        if not self.world.all_true(not (over and self.largest)):
            raise SearchTooLong(f"trying {microbatch_size} would take about {about:,.0f} s")
        if self.world.is_main:
            print(f"trying {microbatch_size}{f', about {about:,.0f} s' if about else ''} ...", flush=True)

    def guess(self) -> int | None:
        """What will fit by the line through the peaks; the same on every rank."""
        line = self.memory_line()
        own = (self.limit_bytes - line[1]) / line[0] if line and line[0] > 0 and len(self.peaks) > 1 else None
        guesses = self.world.gather(int(own) if own is not None and 0 < own < 2**31 else 0)
        return min(guesses) or None

    def fits_here(self, microbatch_size: int) -> bool:
        """Whether this rank has the memory for what training does; once, also for what it does between two steps."""
        try:
            if self._step is None:
                self._step = self.build_step()
            microbatches = [self._window(microbatch_size)] * min(self.accumulation_steps, PROBE_ACCUMULATION)
            result = self._step.run(microbatches, multiplier=0.0)
            if not self._rehearsed:
                self.rehearse(result)
                self._rehearsed = True
            if self.validates:
                microbatch_losses(self._step.model, microbatches[:1], self._step.precision)
            for _ in range(PROBE_STEPS[self.world.device.type] - 1):
                result = self._step.run(microbatches, multiplier=0.0)
            result.losses_A.tolist()  # waits for the device, where the error would come up
        except (RuntimeError, MemoryError, OSError, ImportError, RunError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def _window(self, microbatch_size: int) -> Microbatch:
        tokens = self.tokens.read(self.start_token, microbatch_size * self.context_length + 1)
        return Microbatch(np.minimum(tokens, min(self.largest_token, np.iinfo(tokens.dtype).max)), self.context_length)

    def memory_line(self) -> tuple[float, float] | None:
        """Bytes per sequence and fixed bytes, fitted to the peaks; None if fewer than two sizes fitted."""
        return fit_line([(float(size), float(peak)) for size, peak in self.peaks])


def largest_with_data(experiment: Experiment, world: World, dataset: Dataset) -> int:
    """Sequences in the largest microbatch of which the train split has one global batch. UserError if there is none."""
    config, tokens = experiment.config, dataset.split("train")
    per_sequence = world.size * config.gradient_accumulation_steps * experiment.model.context_length
    ceiling = (len(tokens) - config.start_train_token - 1) // per_sequence
    if ceiling < 1:
        raise UserError(
            f"the train split of {config.dataset} is too short for one global batch: wanted "
            f"{config.start_train_token + per_sequence + 1:,} tokens, but there are {len(tokens):,}"
        )
    return ceiling


def refuse_small_limit(world: World, limit_gib: float) -> None:
    """Raises RunError, on every rank, if a rank's program leaves nothing of the limit. Collective."""
    needed = math.ceil(max(world.gather(program_gib(world.device))) * 100) / 100
    if not world.all_true(room_gib(world.device, limit_gib) > 0):
        raise world.collective_error(
            f"the program alone takes {needed:.2f} GiB, and the limit is {limit_gib:.2f} GiB; raise --memory-limit-gib"
        )


def load_libraries(experiment: Experiment, world: World, dataset: Dataset, rehearsal: Rehearsal) -> None:
    """Do with a tiny `experiment`, without a limit, all that a search does under one: libraries that are loaded,
    threads that are started and buffers that are made only then can end the process, or wait forever, where they get no
    memory.

    Raises RunError if this process may not have that memory in any case. Nothing to do on a GPU.
    """
    if world.device.type == "cuda":
        return
    settle_cpu_memory()
    config = experiment.config
    probe = MicrobatchProbe(
        rehearsal.build_step,
        world,
        dataset.split("train"),
        config.start_train_token,
        experiment.model.context_length,
        PROBE_ACCUMULATION,
        validates=config.validates,
        rehearse=rehearsal.rehearse,
        largest_token=experiment.model.vocab_size - 1,
    )
    loaded = world.all_true(probe.fits_here(1))
    release_memory(world.device)
    if not loaded:
        raise world.collective_error("the program alone takes more memory than this process may have (ulimit -d)")


def remark_on_validation(experiment: Experiment, microbatch_size: int, world: World, dataset: Dataset) -> None:
    """Say what else training with this microbatch wants: a microbatch that fits the memory may be too large for the
    validation split."""
    config = experiment.config.model_copy(update={"microbatch_size": microbatch_size})
    changed = replace(experiment, config=config)
    try:
        changed.check_validation_slice(changed.layout(world.size), dataset)
    except UserError as error:
        say(world, f"note: with a microbatch of {microbatch_size}, {error}")


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
