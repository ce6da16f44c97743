"""Search for the largest microbatch that fits into a device's memory (ddp_train.py -f)."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from harness.common.errors import RunError, UserError
from harness.common.files import check_writable, replace_text
from harness.common.memory import (
    MemoryLimit,
    is_out_of_memory,
    limit_cpu_memory,
    limit_memory,
    peak_of_limited_memory,
    release_memory,
)
from harness.common.messages import GIB, tell
from harness.common.processes import end_with_parent
from harness.data.loader import BatchLayout, Microbatch, TokenLoader
from harness.data.training_data import TrainingData
from harness.distributed.world import World, say
from harness.model.kernels import explain_failed_kernel, should_compile
from harness.model.weights import save_weights
from harness.planning.experiment import Experiment, check_continuable
from harness.planning.plan import make_plan, planned_start
from harness.runs.checkpoint_meta import CheckpointMeta
from harness.runs.results import now, write_search
from harness.runs.throughput import KERNEL_KEYS
from harness.training.saving import HostCopies, copy_state
from harness.training.startup import choose_precision, fetch_data, remark_on_machine
from harness.training.step import OptimizerStep, build_training_step, explain_failed_compilation
from harness.training.zero1 import StatePartition

# Bytes of the tensors exchanged before the search: one of DDP's buckets (of train.json's default size), a smaller one,
# and a scalar. NCCL allocates its buffers, up to a GiB or more, when it first uses an algorithm.
EXCHANGE_BYTES = (100 * 2**20, 25 * 2**20, 4)
STEPS = 3  # optimizer steps per size on a GPU; the memory in use has settled after three
SEARCH_SECONDS = 600.0  # time limit of the search on a CPU, where a size may take minutes
GUESS_GROWTH = 4  # factor by which the margin around a guess grows (see largest_that_fits)
# With a compiled model, most of the time that a size takes is compilation. So fewer sizes are tried, and the result may
# be too small by up to 1/64 of it if it is 128 or more.
COMPILED_GROWTH, COMPILED_FINENESS = 8, 64


def report_max_microbatch(experiment: Experiment, memory_limit_gib: float | None, *, write: bool) -> None:
    """Search for the largest microbatch that fits into memory on every rank, and print the size found. Rank 0 writes
    the result into the run's folder. With `write`, each node's train.json gets this size, or the next smaller one that
    training accepts.

    `memory_limit_gib` limits each GPU or, on a CPU, each process. None means all available memory. Collective: joins
    the other ranks, and leaves them at the end. Raises RunError if not even one sequence fits. Raises UserError if the
    search is not possible here, or if train.json cannot be changed.
    """
    world, config = World.join(), experiment.config
    if write:  # before a search that may take minutes
        world.on_each_node(lambda: check_writable(experiment.run.train_json.resolve().parent))
    remark_on_machine(experiment, world)
    data = fetch_data(world, experiment)
    world.on_each_node(lambda: data.check_token_ids(["train"], experiment.model.vocab_size))
    ceiling = largest_with_data(experiment, world, data)
    if world.device.type == "cuda":
        world.exchange_once(EXCHANGE_BYTES)
        release_memory(world.device)

    def find_start() -> CheckpointMeta | None:
        """Return the meta.json of the checkpoint from which training would resume, or None if training would begin anew
        or refuse to resume. A mirror is not read."""
        with suppress(UserError, RunError):
            if start := planned_start(experiment, world.size, None):
                check_continuable(start, experiment.run.checkpoints, experiment.provenance(data))
                return start
        return None

    meta = world.on_rank0(find_start)
    limit = limit_memory(world.device, memory_limit_gib, world.local_size)
    searcher = MicrobatchSearcher(experiment, world, data, limit, meta)
    found = searcher.find(ceiling)
    if world.is_main:
        searcher.report(found, is_all_data=found == ceiling)

    def refusal(size: int) -> str | None:
        """Return the error message with which training would refuse a microbatch of `size`, or None if training would
        accept it."""
        try:
            # A larger microbatch can need more tokens than a split has, or leave fewer steps than the warm-up has.
            make_plan(replace(experiment, config=config.model_copy(update={"microbatch_size": size})), world.size, meta)
        except UserError as error:
            return str(error)
        return None

    # The microbatch must divide each rank's part of every global batch that train.json sets.
    batches = config.global_batches
    sizes = [size for size in range(found, 0, -1) if all(each % (size * world.size) == 0 for each in batches)]
    if error := refusal(sizes[0]):
        say(world, f"note: training would refuse a microbatch of {sizes[0]}: {error}")
    if write:
        size = next((size for size in sizes if not refusal(size)), None)
        if size is None:
            raise UserError(
                f"{experiment.run.train_json}: not changed, because training refuses every microbatch size; the note "
                "above says why"
            )
        write_size = partial(write_microbatch_size, experiment.run.train_json, size)
        world.on_rank0(write_size)  # first and alone, because the nodes may share the file
        world.on_each_node(write_size)
        times = size / config.microbatch_size
        change = f", and the global batch is {times:.4g} times as large; to keep its size, set global_batch_size"
        unchanged = batches or size == config.microbatch_size
        say(world, f"{experiment.run.train_json}: microbatch_size is now {size}{'' if unchanged else change}")
    world.leave()


class MicrobatchSearcher:
    """Tries microbatch sizes on all ranks at once, and records this rank's memory peak for each size that fits. `meta`
    is the meta.json of the checkpoint from which training would resume, or None."""

    def __init__(
        self, experiment: Experiment, world: World, data: TrainingData, limit: MemoryLimit, meta: CheckpointMeta | None
    ) -> None:
        config = experiment.config
        self.experiment, self.world, self.limit, self.meta = experiment, world, limit, meta
        self.alone = World(0, world.local_rank, 1, 1, world.device)  # steps exchange nothing with other ranks
        self.tokens, self.order = data.tokens("train"), experiment.window_order(data.lengths("train"))
        self.compiles = all(world.gather(should_compile(config.compile, world.device)))
        # If train.json sets the global batch, this number depends on the microbatch; 2 then stands for more than one.
        self.accumulation_steps = 2 if config.global_batches else config.gradient_accumulation_steps
        self.peaks: dict[int, int] = {}  # this rank's peak bytes by size that fits, in the order of the search
        self.failed: list[int] = []  # sizes that do not fit
        self.remark = ""  # for the user; set if SEARCH_SECONDS ended the search
        self._began = time.monotonic()
        self._step: OptimizerStep | None = None

    def find(self, ceiling: int) -> int:
        """Return the largest microbatch size of at most `ceiling` sequences that was found to fit. Collective. Raises
        RunError if not even one sequence fits."""
        rough = {"growth": COMPILED_GROWTH, "fineness": COMPILED_FINENESS} if self.compiles else {}
        found = largest_that_fits(self.fits, ceiling, self.guess, **rough)
        if not found:
            raise self.world.collective_error(
                f"not even a microbatch of 1 fits in {self.limit.gib:.2f} GiB, of which {self.limit.note}; "
                f"{self.limit.remedy}"
            )
        return found

    def fits(self, microbatch_size: int) -> bool:
        """Return True if optimizer steps with this microbatch run on every rank within the memory limit. On a CPU,
        return False without a try once SEARCH_SECONDS have passed and another size fits. Collective."""
        is_late = self.world.device.type == "cpu" and time.monotonic() - self._began > SEARCH_SECONDS
        if any(self.world.gather(is_late and bool(self.peaks))):
            self.remark = f"A larger microbatch may fit; the search ended after {SEARCH_SECONDS:,.0f} s"
            return False
        say(self.world, f"trying {microbatch_size} ...")
        peak = self._try_in_child(microbatch_size) if self.world.device.type == "cpu" else self._try(microbatch_size)
        # Memory is released here and not in `_try`, where the traceback still keeps the failed step's tensors alive.
        release_memory(self.world.device)
        fits_everywhere = all(self.world.gather(peak is not None))
        if peak is not None and fits_everywhere:
            self.peaks[microbatch_size] = peak
        else:
            self.failed.append(microbatch_size)
        say(self.world, f"microbatch {microbatch_size}: {'fits' if fits_everywhere else 'out of memory'}")
        return fits_everywhere

    def guess(self) -> int | None:
        """Return an estimate of the largest size that fits on every rank, or None if a rank cannot estimate it.
        Collective."""
        line = self.line()
        size = (self.limit.usable_bytes - line[1]) / line[0] if line else 0.0
        return min(self.world.gather(int(size) if 0 < size < 2**31 else 0)) or None

    def line(self) -> tuple[float, float] | None:
        """Return slope (bytes per sequence) and intercept (fixed bytes) of the least-squares line of memory peak
        against microbatch size. Returns None if there are fewer than two sizes, or if the line does not rise."""
        if len(self.peaks) < 2:
            return None
        slope, intercept = statistics.linear_regression(list(self.peaks), list(self.peaks.values()))
        return (slope, intercept) if slope > 0 else None

    def _try(self, microbatch_size: int) -> int | None:
        """Run optimizer steps with this microbatch. Return the peak bytes of this rank's memory, or None if this rank
        ran out of memory."""
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)
        try:
            self._train(microbatch_size)
        except (RuntimeError, MemoryError, OSError, ImportError, RunError) as error:
            if is_out_of_memory(error):
                if self._step is not None:
                    self._step.forget_gradients()  # which would take memory from the next size
                return None
            if explained := explain_failed_kernel(error) or explain_failed_compilation(error):
                raise UserError(explained) from None
            raise
        return peak_of_limited_memory(self.world.device)

    def _train(self, microbatch_size: int) -> None:
        """Run optimizer steps at learning rate 0. On a CPU, rank 0 also saves a checkpoint after the first step."""
        device = self.world.device
        if self._step is None:
            self._step = self._build_step()
        elif self.compiles:
            torch.compiler.reset()  # each size is compiled separately, as in training
        step, context = self._step, self.experiment.model.context_length
        microbatch = TokenLoader(self.tokens, self.order, BatchLayout(1, 1, microbatch_size, context)).microbatch(0)
        steps = [microbatch] * STEPS
        if device.type == "cpu":
            one = Microbatch(microbatch.windows[:1])
            # A step takes seconds or minutes here. So the first one, which creates the optimizer's state, has
            # microbatches of one sequence. A compiled model would be compiled again for that size.
            steps = [microbatch if self.compiles else one, microbatch]
        # In training on several ranks, gradients are in DDP's buckets, which exist during every forward pass. The bare
        # model has gradients during a forward pass only from a step's second microbatch on. The second set of buckets
        # that DDP has while it rearranges them is not counted, because no activations exist at that time.
        meets_gradients = self.world.size > 1 or self.accumulation_steps > 1
        kept = None
        # Validation is not run, because it never needs more memory than training.
        for number, each in enumerate(steps):
            result = step.run([each] * (2 if meets_gradients else 1), rate_factor=0.0)
            result.losses_A.tolist()  # waits for the device, which may only now report an error
            if number == 0 and device.type == "cpu" and self.world.is_main:
                kept = self._save(step)
        del kept  # kept until now, as training's background save keeps the copy during the following steps

    def _save(self, step: OptimizerStep) -> object:
        """Copy the tensors of a checkpoint as training does, and write them to a temporary folder. Returns the copy if
        training keeps it in memory, else None."""
        keep = self.experiment.config.async_checkpoint
        copies = HostCopies(self.world.device, keep=keep)
        copied = copy_state(step, self.alone, copies)
        with tempfile.TemporaryDirectory() as folder:
            save_weights(copied["weights"], Path(folder) / "weights")
            torch.save(copied["optimizer"], Path(folder) / "optimizer")
        return (copies, copied) if keep else None

    def _build_step(self) -> OptimizerStep:
        """Return an OptimizerStep without DDP, in the precision in which training would start or resume. It has this
        rank's share of the optimizer's state."""
        experiment, world = self.experiment, self.world
        name = choose_precision(experiment.config, world.device, self.meta)
        compiles = experiment.config.compile if self.compiles else False  # another machine may lack a compiler
        config = experiment.config.model_copy(update={"precision": name, "compile": compiles})
        # The steps run without collectives, so an out-of-memory error on one rank cannot leave the others waiting.
        return build_training_step(experiment, config, self.alone, partition=StatePartition(world.rank, world.size))

    def _try_in_child(self, microbatch_size: int) -> int | None:
        """Return the result of `_try` from a child process, whose writable memory is limited. Also return None if the
        child ended without a result."""
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)

        def answer() -> None:
            """Run `_try`, and send its result or its error to the parent process."""
            end_with_parent()
            silence = os.open(os.devnull, os.O_WRONLY)  # hides what libraries print when memory runs out
            for stream in (1, 2):
                os.dup2(silence, stream)
            limit_cpu_memory(self.limit)
            try:
                sender.send(self._try(microbatch_size))
            except (UserError, RunError) as error:
                sender.send(error)
            except Exception:
                sender.send(RuntimeError(traceback.format_exc()))

        child = context.Process(target=answer, daemon=True)
        child.start()
        sender.close()
        try:
            found = receiver.recv()
        except EOFError:  # the child was ended by the limit, a library without memory, or the out-of-memory killer
            found = None
        finally:
            child.kill()
            child.join()
        if isinstance(found, Exception):
            raise found
        return found

    def report(self, found: int, *, is_all_data: bool) -> None:
        """Print the size found, the measured memory and the limit, and write them into the run's folder. `is_all_data`
        is true if the data or the global batch allow no larger microbatch. Rank 0 only."""
        print(f"Max microbatch size was {found}")
        if self.remark:
            print(self.remark)
        if self.experiment.config.benchmark_tasks is not None:
            print("Not counted: memory that benchmarks need during training; if they run out of it, use a smaller size")
        line, fit = self.line(), "amount per sequence unknown"
        if line:
            digits = max(3, 1 - math.floor(math.log10(line[0] / GIB)))
            fit = f"{line[0] / GIB:.{digits}f} GiB per sequence + {line[1] / GIB:.3f} GiB fixed"
        data = "; the size is limited by the data or the global batch" if is_all_data else ""
        limit = f"limit {self.limit.gib:.2f} GiB, of which {self.limit.note}{data}"
        print(f"Memory: {fit} (peaks measured: {len(self.peaks)}; {limit})")
        print(
            f"Sizes tried: {len(self.peaks) + len(self.failed)}, in {time.monotonic() - self._began:,.0f} s", flush=True
        )
        train = self.experiment.config.model_dump(mode="json")
        result = {
            "kind": "microbatch_search",
            "date": now(),
            "device": self.world.device_name,
            "torch": str(torch.__version__),
            "world_size": self.world.size,
            "asked_gib": self.limit.asked_gib,
            "limit_gib": self.limit.gib,  # of one device; on the CPU, of one process
            "usable_gib": self.limit.usable_bytes / GIB,  # the part of limit_gib that a peak may reach
            "largest": found,
            "smallest_failed": min(self.failed, default=None),
            "is_all_data": is_all_data,
            "tried": [{"microbatch_size": size, "gib": peak / GIB} for size, peak in self.peaks.items()],
            "accumulation_steps": self.accumulation_steps,
            "compiled": self.compiles,
            "model": self.experiment.model.model_dump(mode="json"),
            "train": {key: train[key] for key in KERNEL_KEYS},  # the keys that memory depends on
        }
        try:
            write_search(self.experiment.run, result)
        except RunError as error:
            tell(f"warning: {error}")


def largest_that_fits(
    fits: Callable[[int], bool],
    ceiling: int,
    guess: Callable[[], int | None] = lambda: None,
    *,
    growth: int = 2,
    fineness: float = math.inf,
) -> int:
    """Return the largest size in 1 .. `ceiling` for which `fits(size)` is true, or 0 if no size fits. `fits` must be
    true up to some size and false for every larger one.

    - `guess()` estimates the result from the calls of `fits` so far, or returns None.
    - `growth` is the factor from size to size, as long as all fit and no size is guessed.
    - `fineness` lets the result be too small by up to 1 / `fineness` of itself.
    """
    low, high, guesses = 0, ceiling + 1, 0  # the largest size known to fit, and the smallest known not to fit
    while high - low > max(1, low // fineness):
        if high <= ceiling:
            attempt, end = (low + high) // 2, high
        else:  # all sizes tried so far fit
            attempt = min(growth * low or 1, ceiling)
            end = attempt + 1
        # A guess must be between `low` and `end`, or at most `margin` outside. It is moved so that it is at least
        # `margin` away from both. So if a right guess is made twice, the two sizes that are tried enclose the result.
        # The margin grows from the third guess on, so that wrong guesses cost few tries.
        margin = max(GUESS_GROWTH ** max(0, guesses - 1), int(low / fineness))
        guessed = guess()
        if guessed is not None and low - margin <= guessed <= end + margin and end - low >= 2 * margin:
            attempt = min(max(guessed, low + margin), end - margin)
            guesses += 1
        if fits(attempt):
            low = attempt
        else:
            high = attempt
    return low


def largest_with_data(experiment: Experiment, world: World, data: TrainingData) -> int:
    """Return the largest microbatch, in sequences, for which the train split and train.json's global batches are large
    enough. Raises UserError if the split is too short for microbatches of 1 sequence, or if a global batch is not a
    multiple of the number of ranks."""
    config = experiment.config
    # All passes that `epochs` allows count. The last token is only a target, so it is subtracted below.
    there = experiment.available_tokens(data.lengths("train"))
    if undivided := [size for size in config.global_batches if size % world.size]:
        key = "batch_ramp" if config.batch_ramp else "global_batch_size"
        raise UserError(
            f'{experiment.run.train_json}: key "{key}": {undivided[0]} sequences are not a multiple of '
            f"{world.size}, the number of ranks; change one of these numbers"
        )
    per_sequence = world.size * config.gradient_accumulation_steps * experiment.model.context_length
    ceiling = (there - 1) // per_sequence
    if ceiling < 1:
        raise UserError(
            f"the train split of {config.data_name} is too short for microbatches of even 1 sequence: wanted "
            f"{per_sequence + 1:,} tokens, but training may read {max(0, there):,}; use a longer dataset or fewer "
            "ranks, lower context_length, start_train_token or gradient_accumulation_steps, or allow more passes over "
            'the split with "epochs"'
        )
    return min([ceiling, *(size // world.size for size in config.global_batches)])


def write_microbatch_size(path: Path, size: int) -> None:
    """Change the value of `microbatch_size` in the train.json at `path`, and nothing else in the file. Raises UserError
    if the key is written with an escape (\\u0062 for b)."""
    with path.open(encoding="utf-8", newline="") as file:  # keeps the file's line endings
        text = file.read()
    pattern = r'("(?:micro|mini)batch_size"\s*:\s*)\d+'
    changed, count = re.subn(pattern, lambda match: match.group(1) + json.dumps(size), text, count=1)
    if not count:
        raise UserError(f'{path}: not changed, because "microbatch_size" is written with escapes; set it to {size}')
    if changed != text:
        replace_text(path, changed)
