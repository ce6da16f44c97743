"""Save a run's checkpoints, and resume from a checkpoint.

With the same machine, number of ranks and versions, a resumed run is bit-identical to one that never stopped. On GPUs
or with torch.compile, train.json's `deterministic` must also be true. harness/runs/checkpoints.py reads and writes the
files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn

from harness.common.errors import EXIT, UserError
from harness.common.memory import free_memory, is_out_of_memory, keep_if_ample
from harness.data.loader import TokenLoader
from harness.distributed.watchdog import Place
from harness.distributed.world import World, say
from harness.model.weights import load_weights
from harness.runs import checkpoints
from harness.runs.checkpoint_meta import OPTIMIZER, CheckpointMeta, TrainState
from harness.runs.checkpoints import Checkpoint
from harness.runs.directory import RunDirectory
from harness.runs.metrics import MetricsFile
from harness.runs.upstream import optimizer_by_name
from harness.training.loss_meter import LossMeter
from harness.training.reporter import Reporter
from harness.training.saving import HostCopies, Writer, copy_state
from harness.training.startup import PreparedRun
from harness.training.step import OptimizerStep

# Factor that keeps the seeds of neighboring ranks apart: with it, rank 1 of a run with seed 42 does not draw the same
# numbers as rank 0 of a run with seed 43.
RANK_STRIDE = 1_000_003
PIECE = 2**22  # elements summed at a time, because torch converts a whole operand to int64 before it sums


class Checkpointer:
    """Save checkpoints of the run, and resume from a checkpoint. Every public method is called on every rank; only rank
    0 reads checkpoints and writes files."""

    def __init__(
        self, prepared: PreparedRun, world: World, step: OptimizerStep, meter: LossMeter, reporter: Reporter
    ) -> None:
        self.prepared = prepared
        self.world = world
        self.step = step
        self.model = step.bare_model
        self.meter = meter
        self.reporter = reporter
        self.run = prepared.experiment.run
        self.config = prepared.experiment.config
        self.writer = Writer(in_background=self.config.async_checkpoint)
        # On a CPU a synchronous save needs a copy, too, because weights that share memory cannot be written. The memory
        # of that copy need not be kept between saves.
        is_kept = self.config.async_checkpoint or world.device.type == "cuda"
        self.copies = HostCopies(world.device, keep=is_kept)
        self.saved_step = prepared.position.first_step - 1  # global step of the newest checkpoint, if there is one
        # Read once, because the dataset may be replaced during training.
        tokenizer = prepared.data.tokenizer
        self.tokenizer = (tokenizer.name, tokenizer.read_bytes()) if isinstance(tokenizer, Path) else None
        # The checkpoint that this process resumed from: `keep_checkpoints` does not remove it.
        self.protected = {prepared.checkpoint.name} if prepared.checkpoint else set()

    def restore(self, loader: TokenLoader) -> None:
        """Resume from `prepared.checkpoint`, or begin the run if there is no checkpoint.

        Resets metrics and the links `latest` and `best` to the checkpoint, or moves earlier results aside. Warms up the
        optimizer step with `loader`'s first microbatch. Raises UserError if the checkpoint or the initial weights do
        not fit, or if `compile` is true and compilation fails. Raises RunError or OSError if a move or write fails.
        """
        start, seed, rank = self.prepared.checkpoint, self.config.seed_of("dropout"), self.world.rank
        saved = None
        if start is not None:
            saved = Checkpoint(**self.world.broadcast(lambda: vars(checkpoints.load_checkpoint(start))))
            self.model.load_checkpoint_tensors(saved.weights, start)
        else:
            experiment, initial = self.prepared.experiment, self.prepared.experiment.initial_weights
            if initial is not None:
                with experiment.initial_weights_errors():
                    self.model.load_checkpoint_tensors(self.world.broadcast(lambda: load_weights(initial)), initial)
            aside = self.world.on_rank0(self.run.set_results_aside)
            if aside:
                say(self.world, f"Earlier results are now in {aside}")
            self.reporter.starting()
        # Warm up after the weights are loaded and before any state is restored, because a forward and backward pass
        # changes states.
        self.step.warm_up(loader.microbatch(0), self.world)
        if self.world.device.type == "cpu":
            keep_if_ample(free_memory() // self.world.local_size)
        if start is None or saved is None:
            seed_for_rank(seed, rank)
            return
        restore_optimizer(self.step, saved, start)
        first_step = self.prepared.position.first_step
        if self.prepared.is_from_notebook:  # such a checkpoint holds neither random states nor unreported losses
            seed_for_rank(seed, rank, first_step)
        else:
            restore_ranks(saved, start, self.meter, self.world, seed=seed, step=first_step)
        self.reporter.starting(saved)
        self.world.on_rank0(partial(rewind, self.run, start, saved.meta))

    def save(self, state: TrainState, *, planned: bool, interrupted_evaluation: str | None = None) -> None:
        """Save a checkpoint of the last completed step. May update the losses and the best step in `state`.

        `planned` is true if train.json asks for this checkpoint, false if the run stops early. The resumed run repeats
        `interrupted_evaluation` ("validation", "benchmarks" or None). Raises RunError if the ranks' weights differ or
        the checkpoint cannot be written. With `async_checkpoint`, a failure to write is raised by the next `save`,
        `finish` or `Writer.check`.
        """
        if planned:  # else keep the sums: the next planned checkpoint records the same mean loss as without a stop
            state.close_loss_period()
        if not self.config.validates:  # a lower training loss does not mean a better model, so `best` is `latest`
            state.best_loss, state.best_step = None, state.global_step
        elif planned and self.prepared.position.is_due(state.global_step, self.config.validation_interval):
            state.record_if_best(state.val_loss)  # the loss of this step, not of an earlier one
        with self.prepared.clock.phase("checkpointing"):
            self.check_weights(state)
            random = {"cpu": torch.get_rng_state()}
            if self.world.device.type == "cuda":
                random["cuda"] = torch.cuda.get_rng_state(self.world.device)
            # The key "window" holds the losses since the last report.
            ranks = self.world.gather({"random": random, "window": self.meter.state()})
            self.world.on_rank0(self.writer.wait)  # it may still read the copy of the previous save
            scaler = self.step.scaler.state_dict()  # called before the copies, because it waits for the device
            copied = copy_state(self.step, self.world, self.copies)

            def start_writing() -> None:
                checkpoint = Checkpoint(
                    **copied,
                    scaler=scaler,
                    train_state={"ranks": ranks},
                    meta=self.reporter.meta(state, planned=planned, interrupted_evaluation=interrupted_evaluation),
                    tokenizer=self.tokenizer,
                )
                self.writer.submit(partial(self._write, checkpoint))

            self.world.on_rank0(start_writing)
        self.saved_step = state.global_step

    def _write(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint to disk, update the links to it, and remove old checkpoints if train.json sets
        `keep_checkpoints`. Called on rank 0, perhaps in a background thread."""
        self.copies.wait()
        self.reporter.metrics.make_durable()  # meta.json records the size of metrics.jsonl
        path = checkpoints.save_checkpoint(self.run.checkpoints, checkpoint)
        if self.config.keep_checkpoints is not None:
            kept = {path.name} | self.protected | {str(self.prepared.uploads.sending)}
            checkpoints.prune(self.run.checkpoints, self.config.keep_checkpoints, kept)
        self.prepared.uploads.send_now()

    def check_weights(self, state: TrainState) -> None:
        """Raise RunError on every rank if the weights are not equal on all ranks: a device or its memory is then
        faulty."""
        own: list[int] = []
        if self.world.size > 1:
            with self.world.watchdog.guard(Place(state.global_step, "check")):
                own = weight_checksums(self.model)
        difference = describe_divergence(self.world.gather(own), self.model)
        if difference:
            raise self.world.collective_error(
                f"after global step {state.global_step}, {difference}: a device or its memory is faulty; find and "
                f"exclude that device, then {EXIT.again}; training continues from the latest checkpoint, if there is "
                "one; its weights were equal on all ranks"
            )

    def finish(self) -> None:
        """Wait until every checkpoint is on disk. Raises RunError if the last one could not be written."""
        with self.prepared.clock.phase("checkpointing"):
            self.world.on_rank0(self.writer.wait)


@torch.no_grad()
def weight_checksums(model: nn.Module) -> list[int]:
    """Return, for each parameter in order, the sum of its fp32 elements, each read as a 32-bit integer. Waits for the
    device."""
    sums = []
    for parameter in model.parameters():
        pieces = parameter.detach().reshape(-1).view(torch.int32).split(PIECE)
        sums.append(torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum())
    return torch.stack(sums).tolist()


def describe_divergence(checksums: Sequence[list[int]], model: nn.Module) -> str | None:
    """Describe how the ranks' weights differ, or return None if all are equal. `checksums` holds the `weight_checksums`
    of each rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, each in enumerate(checksums):
        groups.setdefault(tuple(each), []).append(rank)
    if len(groups) == 1:
        return None
    (usual, most), *others = sorted(groups.items(), key=lambda group: -len(group[1]))
    first = min(next(at for at, value in enumerate(odd) if value != usual[at]) for odd, _ in others)
    tensor = [name for name, _ in model.named_parameters()][first]
    if len(most) == len(others[0][1]):
        sides = " and ".join(_ranks(ranks) for ranks in groups.values())
        return f"the weights of {sides} differ, first in {tensor}; there is no majority to say which are right"
    odd_ranks = sorted(rank for _, ranks in others for rank in ranks)
    return f"the weights of {_ranks(odd_ranks)} differ from those of the other {len(most)} ranks, first in {tensor}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def rewind(run: RunDirectory, path: Path, meta: CheckpointMeta) -> None:
    """Set the run's links and metrics to the state of the checkpoint `path`, whose meta.json is `meta`. Rank 0 only.

    Moves later results to a folder below `aside/`, and completes links, metrics and moves that a killed process left
    unfinished. Raises RunError or OSError if files cannot be moved or written.
    """
    make_aside = cache(run.new_aside)  # makes one folder for all moved files, and only if a file is moved
    run.set_measurements_aside(meta.global_step, make_aside)
    if any(step > meta.global_step for step, _ in checkpoints.list_checkpoints(run.checkpoints)):
        run.set_summary_and_chart_aside(make_aside())  # first: with a summary, the run counts as finished
    checkpoints.rewind_to(run.checkpoints, path, make_aside)
    MetricsFile(run.metrics).rewind_to(meta, make_aside)


def seed_for_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed this rank's random generators, which dropout uses. The seed differs between ranks, and between values of
    `seed` and of `step`, the first global step of this process."""
    torch.manual_seed((seed + (rank + 1) * RANK_STRIDE + step * RANK_STRIDE**2) % 2**63)


def restore_ranks(saved: Checkpoint, path: Path, meter: LossMeter, world: World, *, seed: int, step: int) -> None:
    """Restore this rank's random state and unreported losses from `saved`, the content of the checkpoint `path`.

    If the number of ranks has changed, rank 0's meter gets the losses of all ranks. Random states that cannot be
    restored are seeded with `seed` and `step`, this process's first global step. Raises UserError if states do not fit.
    """
    with state_errors_as_user_errors(path / checkpoints.TRAIN_STATE):
        if not isinstance(saved.train_state, dict):  # indexing a tensor with "ranks" would warn, not raise
            raise ValueError('not a dict with the key "ranks"')
        ranks = [(rank["window"], rank["random"]) for rank in saved.train_state["ranks"]]
        if len(ranks) != world.size:
            seed_for_rank(seed, world.rank, step)
            if world.is_main:
                meter.load_state([losses for losses, _ in ranks])
            return
        losses, random = ranks[world.rank]
        meter.load_state([losses])
        if world.device.type == "cuda" and "cuda" not in random:  # the run was on CPUs before
            seed_for_rank(seed, world.rank, step)
        elif world.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], world.device)
        torch.set_rng_state(random["cpu"])


def restore_optimizer(step: OptimizerStep, saved: Checkpoint, path: Path) -> None:
    """Load the states of the optimizer and the gradient scaler from `saved`, the content of the checkpoint `path`.

    Call on every rank. Loads nothing if there is no optimizer state and only the lab notebook's program
    (harness/runs/upstream.py) has trained the weights. Raises UserError if a state does not fit this run.
    """
    is_untrained = saved.meta.is_from_notebook or saved.meta.foreign_tokens == saved.meta.tokens_seen
    if is_untrained and not saved.optimizer:
        return
    with state_errors_as_user_errors(path / OPTIMIZER):
        named = saved.optimizer
        if saved.meta.is_from_notebook:
            named = optimizer_by_name(named, step.optimizer.state_shapes())
        step.optimizer.load_named_state(named)
    if saved.scaler and step.scaler.is_enabled():
        with state_errors_as_user_errors(path / checkpoints.SCALER):
            numbers = {key: saved.scaler[key] for key in step.scaler.state_dict()}
            if not all(type(number) in (int, float) for number in numbers.values()):
                raise ValueError(f"expected only numbers, found {numbers}")
            step.scaler.load_state_dict(numbers)


@contextmanager
def state_errors_as_user_errors(file: Path) -> Iterator[None]:
    """Context manager that turns errors from a state of unexpected structure into UserError, which names `file`. If
    memory has run out, the error stays as it is."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        raise UserError(
            f"{file}: does not hold this run's state: {reason}; give the name of another checkpoint, or --restart"
        ) from None
