"""The largest microbatch that fits into a device's memory (ddp_train.py -f).

`report_max_microbatch` is what the command does. `find_max_microbatch` searches (microbatch_probe.py): sizes grow
until one does not fit, then the rest is bisected, with guesses from the memory that was measured so far.
Each size is tried by a `MicrobatchProbe`: real steps of the run's model on its own data, under a limit, on all ranks at
once, and the first time also all that training does between two steps (harness/training/rehearsal.py). A model that
training compiles has a search of its own (harness/training/compiled_probe.py).
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click
import torch

from harness.common.errors import RunError, UserError
from harness.common.files import replace_text
from harness.common.memory import (
    MemoryLimit,
    limit_memory,
    program_gib,
    release_memory,
    settle_cpu_memory,
)
from harness.common.units import GIB
from harness.data.dataset import Dataset, check_token_ids
from harness.distributed.world import World
from harness.model.kernels import should_compile
from harness.planning.experiment import Experiment
from harness.runs.results import MicrobatchSearch, TriedMicrobatch, now, write_result
from harness.runs.throughput import KERNEL_KEYS
from harness.training.microbatch_probe import (
    PROBE_ACCUMULATION,
    Found,
    MicrobatchProbe,
    SearchTooLong,
    largest_that_fits,
)
from harness.training.rehearsal import Rehearsal, RehearsedTrainer
from harness.training.startup import fetch_dataset, remark_on_machine, say

# So much is exchanged before a GPU's memory is looked at: NCCL makes its buffers, of up to a GiB or more, when it is
# first used.
EXCHANGE_BYTES = 2**26

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
    if world.device.type == "cuda":
        world.exchange_once(EXCHANGE_BYTES)
        release_memory(world.device)
    limit = limit_memory(world.device, memory_limit_gib, world.local_size)
    refuse_small_limit(world, limit.gib)
    probe, search = _choose_search(config.compile, world.device)
    tried = build_probe(probe, experiment, world, dataset, rehearsal, limit_bytes=limit.usable_bytes)
    found = search(tried, ceiling)
    if not found.size:
        raise world.collective_error(
            f"not even a microbatch of 1 fits in {limit.gib:.2f} GiB; use a smaller model or context"
        )
    if world.is_main:
        is_all_data = found.size == ceiling
        print(f"Max microbatch size was {found.size}")
        if found.remark:
            print(found.remark)
        if config.benchmark_tasks is not None:
            print("Not counted: the memory of benchmarks while training")
        print(f"Memory: {describe_memory(tried, limit, is_all_data=is_all_data)}")
        print(f"Search: {tried.describe()}", flush=True)
        keep_search(experiment, search_record(experiment, tried, found.size, limit, is_all_data=is_all_data))
    return found.size


def build_probe(
    kind: type[MicrobatchProbe],
    experiment: Experiment,
    world: World,
    dataset: Dataset,
    rehearsal: Rehearsal,
    **more: Any,
) -> MicrobatchProbe:
    """A probe of the run's steps on its own data."""
    config = experiment.config
    return kind(
        rehearsal.build_step,
        world,
        dataset.split("train"),
        config.start_train_token,
        experiment.model.context_length,
        config.gradient_accumulation_steps if config.sequences is None else PROBE_ACCUMULATION,
        validates=config.validates,
        rehearse=rehearsal.rehearse,
        **more,
    )


def search_record(
    experiment: Experiment, probe: MicrobatchProbe, largest: int, limit: MemoryLimit, *, is_all_data: bool
) -> MicrobatchSearch:
    """The record of a finished search for the run's folder."""
    config, world = experiment.config, probe.world
    train = config.model_dump(mode="json")
    return MicrobatchSearch(
        date=now(),
        device=world.device_name,
        torch=str(torch.__version__),
        world_size=world.size,
        asked_gib=limit.asked_gib,
        limit_gib=limit.gib,
        usable_gib=limit.usable_bytes / GIB,
        largest=largest,
        smallest_failed=probe.smallest_failed,
        is_all_data=is_all_data,
        tried=[TriedMicrobatch(microbatch_size=int(size), gib=peak / GIB) for size, peak in probe.peaks],
        accumulation_steps=probe.accumulation_steps,
        compiled=should_compile(config.compile, world.device),
        model=experiment.model.model_dump(mode="json"),
        train={key: train[key] for key in KERNEL_KEYS},
    )


def keep_search(experiment: Experiment, search: MicrobatchSearch) -> None:
    """Write it into the run's folder. That it cannot be written is a warning: its answer has been printed."""
    try:
        write_result(experiment.run, search)
    except RunError as error:
        click.echo(f"warning: {error}", err=True)


def _choose_search(
    compiled: bool | Literal["auto"], device: torch.device
) -> tuple[type[MicrobatchProbe], Callable[[Any, int], Found]]:
    """The probe and the search for how training will compute the model: compiled or not."""
    if not should_compile(compiled, device):
        return MicrobatchProbe, find_uncompiled
    from harness.training.compiled_probe import CompiledProbe, find_compiled  # much of torch, in a search's memory

    return CompiledProbe, find_compiled


def find_uncompiled(probe: MicrobatchProbe, ceiling: int) -> Found:
    """The largest microbatch that fits: each size is as cheap to try as any other. Collective."""
    try:
        return Found(largest_that_fits(probe.fits, ceiling, probe.guess))
    except SearchTooLong as reason:
        return Found(probe.largest, f"More may fit; the search has ended, since {reason}")


def describe_memory(probe: MicrobatchProbe, limit: MemoryLimit, *, is_all_data: bool) -> str:
    """Describe the memory of a sequence (GiB), and the peaks and the limit behind that number."""
    line = probe.memory_line()
    fit = f"{line[0] / GIB:.3f} GiB per sequence + {line[1] / GIB:.3f} GiB fixed" if line else "too few sizes to tell"
    note = f"limit {limit.gib:.2f} GiB, of which {limit.note}{', limited by the data' if is_all_data else ''}"
    return f"{fit} (from {len(probe.peaks)} peaks; {note})"


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
    if not world.all_true(program_gib(world.device) < limit_gib):
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
    last_token = experiment.model.vocab_size - 1
    probe = build_probe(MicrobatchProbe, experiment, world, dataset, rehearsal, largest_token=last_token)
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

    With a `global_batch_size` or a `batch_ramp` a usable one divides it evenly over the ranks. Raises RunError if there
    is none.
    """
    path, config = experiment.run.train_json, experiment.config
    wanted = [size for _, size in config.batch_ramp or []] or [config.global_batch_size or 0]
    size = next((n for n in range(found, 0, -1) if all(each % (n * world_size) == 0 for each in wanted)), 0)
    if not size:
        key = "batch_ramp" if config.batch_ramp else "global_batch_size"
        sizes = ", ".join(map(str, wanted))
        raise RunError(f"{path}: no microbatch divides {key} {sizes} over {world_size} ranks")
    text = path.read_text(encoding="utf-8")
    pattern = r'("(?:micro|mini)batch_size"\s*:\s*)\d+'
    replace_text(path, re.sub(pattern, lambda match: match.group(1) + json.dumps(size), text, count=1))
    return size
