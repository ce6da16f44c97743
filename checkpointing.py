"""Save a run's checkpoints, and resume from one so that training is the same to the last bit.

A checkpoint holds the weights, the states of the optimizer and the gradient scaler, every rank's random state and its
losses since the last report, and in meta.json the progress of training. harness/runs/checkpoints.py reads and writes
the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from harness.common.errors import SPEAKER_PATIENCE_SECONDS, UserError
from harness.common.memory import free_memory, keep_if_ample
from harness.data.loader import Microbatch, TokenLoader
from harness.distributed.replicas import describe_divergence, weight_checksums
from harness.distributed.watchdog import Place
from harness.distributed.world import World
from harness.model.weights import checkpoint_views, load_weights
from harness.runs import checkpoints
from harness.runs.checkpoint_meta import CheckpointMeta, TrainState
from harness.runs.checkpoints import Checkpoint
from harness.runs.directory import RunDirectory
from harness.runs.metrics import MetricsFile
from harness.runs.upstream import optimizer_by_name
from harness.training.loss_meter import LossMeter
from harness.training.reporter import Reporter, program_and_settings, restore_summary
from harness.training.saving import AsyncWriter, HostCopies, SyncWriter
from harness.training.startup import PreparedRun, say
from harness.training.step import OptimizerStep

# Factor that keeps the seeds of neighboring ranks apart: rank 1 of seed 42 has another seed than rank 0 of seed 43.
RANK_STRIDE = 1_000_003


class Checkpointer:
    """Saves checkpoints of the run and resumes from one. Every method is called on every rank; rank 0 reads and
    writes."""

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
        self.writer = AsyncWriter() if self.config.async_checkpoint else SyncWriter()
        # On a CPU a synchronous save needs a copy too, because weights that share memory cannot be written. That copy
        # need not be kept between saves.
        is_kept = self.config.async_checkpoint or world.device.type == "cuda"
        self.copies = HostCopies(world.device, keep=is_kept)
        self.saved_step = prepared.position.first_step - 1
        # The checkpoint that this process resumed from: `keep_checkpoints` does not remove it.
        self.protected = {prepared.checkpoint.name} if prepared.checkpoint else set()

    # Restoring --------------------------------------------------------------------------------------------------------

    def restore(self, loader: TokenLoader) -> None:
        """Restore model, optimizer, random states and unreported losses from the run's checkpoint. Without a
        checkpoint, begin the run: load initial weights, move earlier results aside, and seed. In both cases warm up the
        step with `loader`'s first microbatch.

        Raises UserError if the checkpoint belongs to another model.
        """
        # Called after the weights are loaded and before any state is, because a forward and backward pass changes
        # states.
        warm_up = partial(self._warm_up, loader.microbatch(0))
        if self.prepared.checkpoint is None:
            self._begin()
            warm_up()
            seed_for_rank(self.config.random_seed, self.world.rank)
            return
        saved = self._read(self.prepared.checkpoint)
        self.model.load_checkpoint_tensors(saved.weights, self.prepared.checkpoint)
        warm_up()
        self._load_states(saved, self.prepared.checkpoint)
        self.reporter.continuing(self.prepared.checkpoint, saved, self.step.precision)
        self.world.on_rank0(partial(rewind, self.run, self.prepared.checkpoint, saved.meta))

    def _warm_up(self, microbatch: Microbatch) -> None:
        self.step.settle_compilation(microbatch, self.config.compile, self.world)
        self.step.warm_up(microbatch)
        if self.world.device.type == "cpu":
            keep_if_ample(free_memory() // self.world.local_size)

    def _begin(self) -> None:
        """Load the weights that train.json's `initial_weights` names, if it is set, and move earlier results aside."""
        initial = self.config.initial_weights
        if initial is not None:
            path = self.run.path / initial
            self.model.load_checkpoint_tensors(self.world.broadcast(lambda: load_weights(path)), path)
        aside = self.world.on_rank0(self.run.set_results_aside)
        if aside:
            say(self.world, f"Earlier results are now in {aside}")
        self.reporter.beginning(self.step.precision)

    def _read(self, path: Path) -> Checkpoint:
        return Checkpoint(**self.world.broadcast(lambda: vars(checkpoints.load_checkpoint(path))))

    def _load_states(self, saved: Checkpoint, path: Path) -> None:
        """Load the states of optimizer and scaler, the random states and the unreported losses. A checkpoint of the lab
        notebook, the program that this format comes from, has neither random states nor unreported losses."""
        seed, first_step = self.config.random_seed, self.prepared.position.first_step
        states = OptimizerStates(saved.optimizer, saved.scaler)
        try:
            if self.prepared.is_from_notebook:
                load_notebook_optimizer(self.step, states)
                seed_for_rank(seed, self.world.rank, first_step)
            else:
                restore_optimizer(self.step, states)
                restore_ranks(saved.train_state, self.meter, self.world, seed=seed, step=first_step)
        except UserError as error:
            raise UserError(f"{path}/{error}; use another checkpoint by its name, or --restart") from None

    # Saving --------------------------------------------------------------------------------------------------------

    def save(self, state: TrainState) -> None:
        """Save the scheduled checkpoint of the last completed step. The link `best` will point to it if its validation
        loss is the lowest so far, or if the run has no validation."""
        state.begin_checkpoint()
        if self.prepared.position.is_due(state.global_step, self.config.validation_interval):
            state.record_if_best(state.val_loss)
        self._save(state, planned=True)
        self.reporter.checkpoint(state)

    def save_interrupted(self, state: TrainState, during: str | None) -> None:
        """Save a checkpoint of the last completed step after a signal, unless that step is already saved. `during`
        names the evaluation that the signal interrupted ("validation" or "benchmarks"), or is None. meta.json records
        it, so that the resumed run repeats that evaluation and does what follows it. metrics.jsonl gets no line for
        this checkpoint, so that the file equals that of a run that never stopped."""
        if during or state.global_step != self.saved_step:
            self._save(state, during=during)
        self.finish()

    def check_weights(self, state: TrainState) -> None:
        """Raise RunError if the ranks' weights are no longer the same."""
        own: list[int] = []
        if self.world.size > 1:
            with self.world.watchdog.guard(Place(state.global_step, "check")):
                own = weight_checksums(self.model)
        difference = describe_divergence(self.world.gather(own), self.model)
        if difference:
            raise self.world.collective_error(
                f"{difference} after global step {state.global_step}: a device or its memory is faulty; the "
                "checkpoints on disk were checked before they were written: exclude that device, and run the "
                "command again to continue"
            )

    def finish(self) -> None:
        """Wait until every checkpoint is on disk."""
        with self.prepared.clock.phase("checkpointing"):
            self.world.on_rank0(self.writer.wait)

    @contextmanager
    def completing_saves(self) -> Iterator[None]:
        """Wait up to SPEAKER_PATIENCE_SECONDS for a background save to end if the body raises, then raise the body's
        error."""
        try:
            yield
        except Exception:
            with suppress(Exception):  # an error of the save must not replace the body's
                self.writer.wait(SPEAKER_PATIENCE_SECONDS)
            raise

    def _save(self, state: TrainState, *, planned: bool = False, during: str | None = None) -> None:
        if not self.config.validates:  # a lower training loss does not mean a better model, so `best` is `latest`
            state.best_loss, state.best_step = None, state.global_step
        occasion: dict[str, Any] = {
            "is_best": state.is_best,
            "planned": planned,
            "validation_due": during == "validation",
            "benchmarks_due": during == "benchmarks",
        }
        with self.prepared.clock.phase("checkpointing"):
            self.check_weights(state)
            ranks = capture_ranks(self.meter, self.world)
            self.world.on_rank0(self.writer.wait)  # the writer may still read the copy of the previous save
            states = capture_optimizer(self.step, self.world)
            self.world.on_rank0(lambda: self._write(states, ranks, self._meta(state, occasion)))
        self.saved_step = state.global_step

    def _meta(self, state: TrainState, occasion: dict[str, Any]) -> CheckpointMeta:
        tokenizer = self.prepared.dataset.tokenizer
        return CheckpointMeta(
            **state.values(),
            **occasion,
            seconds=self.prepared.clock.now(),
            metrics_bytes=self.reporter.metrics.size(),
            world_size=self.world.size,
            microbatch_size=self.prepared.layout.microbatch_size,
            accumulation_steps=self.prepared.layout.accumulation_steps,
            device=self.world.device_name,
            precision=self.step.precision.name,
            tokenizer=tokenizer.name if isinstance(tokenizer, Path) else tokenizer,
            torch=torch.__version__,
            **program_and_settings(self.prepared),
            **vars(self.prepared.provenance),
        )

    def _write(self, states: OptimizerStates, ranks: dict[str, Any], meta: CheckpointMeta) -> None:
        """Copy the tensors to host memory and submit the checkpoint to the writer, which may use a thread. A GPU may
        not have finished the copies when this returns. The next step runs after them, and the writer waits for them."""
        tokenizer = self.prepared.dataset.tokenizer
        weights = checkpoint_views(self.model.state_dict(), self.model.config)
        copied = self.copies.copy({"weights": weights, "optimizer": states.optimizer})
        checkpoint = Checkpoint(
            **copied,
            scaler=states.scaler,
            train_state=ranks,
            meta=meta,
            tokenizer=tokenizer if isinstance(tokenizer, Path) else None,
        )
        self.writer.submit(lambda: self._write_checkpoint(checkpoint))

    def _write_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.copies.wait()
        self.reporter.metrics.make_durable()  # meta.json records the size of metrics.jsonl
        path = checkpoints.save_checkpoint(self.run.checkpoints, checkpoint)
        if self.config.keep_checkpoints is not None:
            checkpoints.prune(self.run.checkpoints, self.config.keep_checkpoints, {path.name} | self.protected)


def finish_already_trained(prepared: PreparedRun, world: World, *, named: bool) -> None:
    """Print that the run is finished, and complete what a process that was killed at its very end left undone. `named`
    is true if the user named the checkpoint; links and metrics are then left as they are. Collective."""
    run = prepared.experiment.run
    say(world, f"{run.path.name} is finished: {prepared.position.first_step:,} global steps; --restart trains it again")
    if prepared.checkpoint and prepared.meta and not named:
        world.on_rank0(partial(rewind, run, prepared.checkpoint, prepared.meta))
    restore_summary(prepared, world)


def rewind(run: RunDirectory, path: Path, meta: CheckpointMeta) -> None:
    """Set the run's links and metrics back to the checkpoint `path`, even if the process that saved it was killed
    before it had updated them. Everything later is moved to a folder below `aside/`. Rank 0 only."""
    make_aside = cache(run.new_aside)  # one folder for everything, made only if something is moved
    run.set_measurements_aside(meta.global_step, make_aside)
    if checkpoints.rewind_to(run.checkpoints, path, make_aside):
        run.set_pictures_aside(make_aside())
    MetricsFile(run.metrics).rewind_to(meta, make_aside)


# State captured as plain data, and restored --------------------------------------------------------------------------


def capture_ranks(meter: LossMeter, world: World) -> dict[str, Any]:
    """Return every rank's random state and unreported losses. Collective."""
    random = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(world.device)
    return {"ranks": world.gather({"random": random, "window": meter.state()})}


def seed_for_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed this rank's random generator, which dropout uses. The result differs by seed, by rank and by `step`, the
    first global step of a resumed run."""
    torch.manual_seed((seed + (rank + 1) * RANK_STRIDE + step * RANK_STRIDE**2) % 2**63)


def restore_ranks(saved: dict[str, Any], meter: LossMeter, world: World, *, seed: int, step: int) -> None:
    """Restore this rank's random state and unreported losses. If the number of ranks has changed, seed this rank anew
    and merge all unreported losses into rank 0's.

    Raises UserError if `saved` is not such a state.
    """
    with state_errors_as_user_errors("train_state.pt"):
        if not isinstance(saved, dict):  # indexing a tensor with "ranks" would warn, not raise
            raise ValueError("not a table of states")
        ranks = [(rank["window"], rank["random"]) for rank in saved["ranks"]]
        if not ranks:
            raise ValueError("no ranks")
        if len(ranks) == world.size:
            own_losses, own_random = ranks[world.rank]
            meter.load_state(own_losses)
            if world.device.type == "cuda" and "cuda" not in own_random:  # the run was on CPUs before
                seed_for_rank(seed, world.rank, step)
            elif world.device.type == "cuda":
                torch.cuda.set_rng_state(own_random["cuda"], world.device)
            torch.set_rng_state(own_random["cpu"])
            return
        seed_for_rank(seed, world.rank, step)
        if world.is_main:
            meter.load_merged([values for values, _ in ranks])


@dataclass(frozen=True)
class OptimizerStates:
    """States of the optimizer (from `Optimizer.named_state`; in a notebook's checkpoint torch's own state dict) and of
    the gradient scaler (empty without fp16)."""

    optimizer: dict[str, Any]
    scaler: dict[str, Any]


def capture_optimizer(step: OptimizerStep, world: World) -> OptimizerStates:
    """Return the states; rank 0's are the ones to save. The optimizer's tensors are not copied, and the next step
    changes them. Collective."""
    return OptimizerStates(step.optimizer.named_state(world), step.scaler.state_dict())


def restore_optimizer(step: OptimizerStep, saved: OptimizerStates) -> None:
    """Load the states that `capture_optimizer` returned on rank 0. Called on every rank.

    Raises UserError, naming the file, if a state is not one of this optimizer or scaler.
    """
    with state_errors_as_user_errors("optimizer.pt"):
        step.optimizer.load_named_state(saved.optimizer)
    if saved.scaler and step.scaler.is_enabled():
        with state_errors_as_user_errors("scaler.pt"):
            step.scaler.load_state_dict({key: _number(saved.scaler[key]) for key in step.scaler.state_dict()})


def load_notebook_optimizer(step: OptimizerStep, saved: OptimizerStates) -> None:
    """Load the states of a notebook's checkpoint. If it has no optimizer state, the optimizer begins without one."""
    if saved.optimizer:
        with state_errors_as_user_errors("optimizer.pt"):
            named = optimizer_by_name(saved.optimizer, step.optimizer.state_shapes())
        restore_optimizer(step, OptimizerStates(named, saved.scaler))


def _number(value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a number")
    return value


@contextmanager
def state_errors_as_user_errors(file: str) -> Iterator[None]:
    """Turn the errors that a state of unexpected structure causes into UserError. `file` could be read and has the
    right hash, but its content is something else."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        raise UserError(f"{file}: holds something else than this run's state: {reason}") from None
