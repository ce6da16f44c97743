"""Everything that can refuse a run, before anything is built: its lock, its data, its checkpoint and its plan."""

from __future__ import annotations

import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch

from harness.common.device import idle_gpus
from harness.common.errors import PeerError, RunError, RunStopped, UserError
from harness.common.lock import RunLock
from harness.common.memory import is_out_of_memory, taken_by_others
from harness.common.options import TrainOptions
from harness.data.dataset import Dataset
from harness.data.fetch import ensure_dataset
from harness.data.loader import BatchLayout, BatchSchedule
from harness.distributed.rendezvous import leaving_with_peers
from harness.distributed.signals import StopSignal
from harness.distributed.world import World
from harness.model.kernels import explain_nondeterminism, not_compiled, rounded_dropout, should_compile
from harness.model.precision import Precision
from harness.planning.experiment import Experiment, Position, comparable_losses, first_difference
from harness.planning.plan import Plan, describe_start, make_plan
from harness.planning.planned_speed import plan_speed
from harness.planning.rates import UNSCALED, ScaledSettings
from harness.runs import checkpoints
from harness.runs.budget import Budget
from harness.runs.checkpoint_meta import CheckpointMeta, Provenance, TrainState, upgrade_notebook_meta
from harness.runs.directory import RunDirectory
from harness.runs.metrics import PHASES
from harness.runs.throughput import Conditions, same_conditions, unknown_peak
from harness.runs.train_config import TrainConfig


@dataclass
class Clock:
    """Seconds spent in each phase, over all parts of a run that was continued."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _phase: str = "setup"
    _since: float = field(default_factory=time.perf_counter)

    def add(self, earlier: dict[str, float]) -> None:
        """Count the seconds that earlier parts of the run took, too."""
        for phase in self.seconds:
            self.seconds[phase] += earlier.get(phase, 0.0)

    def enter(self, phase: str) -> str:
        """Count time for `phase` from now on; the phase that ends."""
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        ended, self._phase, self._since = self._phase, phase, now
        return ended

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def now(self) -> dict[str, float]:
        """Seconds by phase up to this moment."""
        self.enter(self._phase)
        return dict(self.seconds)

    @property
    def total(self) -> float:
        return sum(self.now().values())


@dataclass(frozen=True)
class PreparedRun:
    """The inputs of a process's training: all is checked, and nothing is built yet."""

    experiment: Experiment
    dataset: Dataset
    layout: BatchLayout
    position: Position
    clock: Clock  # has the seconds of earlier parts of the run
    checkpoint: Path | None = None  # to continue from
    meta: CheckpointMeta | None = None  # what it says of itself; a notebook's with what ours would say
    is_from_notebook: bool = False
    lock: RunLock | None = None
    precision: str | None = None  # what "auto" means for this run; None: what the device is best at
    budget: Budget | None = None  # what train.json's came to when the run began, if that is not in tokens
    scaled: ScaledSettings = UNSCALED  # what its scaling rules make of its settings

    @property
    def provenance(self) -> Provenance:
        """The model, settings and dataset that a checkpoint belongs to."""
        return self.experiment.provenance(self.dataset)

    @property
    def step_config(self) -> TrainConfig:
        """train.json with the precision that it comes to, and what its scaling rules make of it."""
        config = self.scaled.apply(self.experiment.config)
        return config if self.precision is None else config.model_copy(update={"precision": self.precision})

    @property
    def batches(self) -> BatchSchedule:
        """The global batches of the steps from here on."""
        return self.experiment.batches(self.layout, self.position.tokens_seen)

    @property
    def interrupted_in(self) -> str | None:
        """The evaluation that a signal interrupted after the last step: "validation" or "benchmarks"; it and what
        follows it are still due."""
        return self.meta.due if self.meta else None

    @property
    def is_finished(self) -> bool:
        return self.meta is not None and self.position.is_finished and self.interrupted_in is None

    def note_begun(self) -> None:
        """Record that the run resumes if torchrun starts it again from now on. Rank 0 only."""
        assert self.lock is not None
        self.lock.note_begun()

    def state(self, world: World) -> TrainState:
        """The state of training at this start."""
        if self.meta is None:
            return TrainState()
        state, now = self.meta.state(), Conditions(world.size, world.device_name, self.provenance.train)
        if not same_conditions(self.meta.conditions, now):  # the speed is that of today's batch on today's machine
            state.measure_from_here(self.clock.seconds["training"])
        if self.is_from_notebook or not comparable_losses(self.meta, self.provenance):
            state.forget_best()
        return state


def prepare(
    experiment: Experiment, world: World, clock: Clock, checkpoint: str | None, options: TrainOptions
) -> PreparedRun:
    """Take the run's lock, fetch its data, choose and verify the checkpoint to continue from, and check the plan.

    `checkpoint` is a folder's name, "latest" or "best"; None for the latest, if there is one. Of `options`, --restart
    and the speed that a budget is reckoned with are looked at. Collective. Raises
    UserError or RunError, with the remedy, for whatever would keep the run from its end.
    """
    run, layout = experiment.run, experiment.layout(world.size)
    remark_on_machine(experiment, world)
    lock = world.on_rank0(run.lock)
    dataset = fetch_dataset(world, experiment.datasets_dir, experiment.config.dataset, experiment.splits)
    check_same_everywhere(experiment, world, dataset)

    def choose() -> tuple[Path, CheckpointMeta] | None:
        if lock.began_before:  # torchrun has restarted its workers: what the user asked for was done the first time
            return checkpoints.open_start(run.checkpoints, None)
        return None if options.restart else checkpoints.open_start(run.checkpoints, checkpoint)

    path, meta = world.on_rank0(choose) or (None, None)
    if world.on_rank0(lambda: lock.began_before or not options.restart):
        refuse_wrong_machine(world, run)
    is_from_notebook = meta is not None and meta.is_from_notebook
    if path and meta:
        meta = upgrade_notebook_meta(path, meta, experiment.provenance(dataset), experiment.batches(layout))
        clock.add(meta.seconds)
    # The plan's checks are the run's: short data, unknown tokens, a long warm-up or a full disk end it here.
    plan = world.on_each_node(lambda: make_plan(experiment, world.size, meta))
    world.on_rank0(lambda: plan.check_disk(run.path))
    world.on_rank0(lambda: say_plan(experiment, plan, options))
    assert plan.position is not None, "the dataset is here"
    checkpoints.check_tokenizer(dataset.tokenizer)
    precision = world.broadcast(lambda: choose_precision(experiment.config, world.device, meta))
    return PreparedRun(
        experiment,
        dataset,
        layout,
        plan.position,
        clock,
        checkpoint=path,
        meta=meta,
        is_from_notebook=is_from_notebook,
        lock=lock,
        precision=precision,
        budget=plan.budget,
        scaled=plan.scaled,
    )


def say_plan(experiment: Experiment, plan: Plan, options: TrainOptions) -> None:
    """Print what train.json's budget, ramp and scaling rules come to, and what is odd, before anything is spent on it.
    Rank 0 only."""
    if plan.position is None or plan.position.is_finished:
        return
    if plan.dataset_remark:
        click.echo(f"note: {plan.dataset_remark}")
    speed = None if plan.budget is None else plan_speed(experiment, plan.layout, options)
    for line in describe_start(plan, speed):
        click.echo(line)


def choose_precision(config: TrainConfig, device: torch.device, meta: CheckpointMeta | None) -> str:
    """The precision of a run, alike on all ranks: with "auto" a run keeps the one that it was begun in as long as it
    stays on the CPU, or on GPUs, since another processor must not change its numbers unasked."""
    best = Precision.for_training(config.precision, device).name
    if config.precision != "auto" or meta is None or meta.device is None or meta.train.get("precision") != "auto":
        return best
    was_on_cpu = meta.device.endswith(" CPU")
    if was_on_cpu != (device.type == "cpu"):
        return best
    begun = meta.precision or (Precision.resolve("auto", device).name if was_on_cpu else best)
    try:
        return Precision.resolve(begun, device).name
    except UserError:  # another GPU, which does not compute it
        return best


def fetch_dataset(world: World, datasets_dir: Path, name: str, splits: list[str]) -> Dataset:
    """The dataset with the wanted splits, on every rank; each node's first process brings it if it is not there."""
    world.on_each_node(lambda: ensure_dataset(datasets_dir, name, splits))
    return Dataset.open(datasets_dir, name)


def check_same_everywhere(experiment: Experiment, world: World, dataset: Dataset) -> None:
    """Raises UserError, on every rank, if a rank's machine has other files than rank 0's. Collective."""
    machines = world.gather((socket.gethostname(), experiment.provenance(dataset)))
    (first_host, expected), *others = machines
    files = (("model", experiment.run.model_json), ("train", experiment.run.train_json), ("dataset", "dataset"))
    for rank, (host, provenance) in enumerate(others, start=1):
        for part, file in files:
            difference = first_difference(getattr(expected, part), getattr(provenance, part))
            if difference:
                raise UserError(
                    f"{file}: not the same on {first_host} (rank 0) and {host} (rank {rank}): {difference}; "
                    "give both the same"
                )


def refuse_wrong_machine(world: World, run: RunDirectory) -> None:
    """Raises UserError if another machine than rank 0's has later checkpoints of this run, which would start again."""
    steps = [at for at, _ in checkpoints.list_checkpoints(run.checkpoints)]
    (newest, _), *others = world.gather((max(steps, default=-1), socket.gethostname()))
    found, host = max(others, default=(newest, ""))
    if found > newest:
        raise UserError(
            f"{run.checkpoints}: {host} has checkpoints up to step {found:,}, but rank 0 is on another machine, which "
            f"{f'ends at step {newest:,}' if newest >= 0 else 'has none'}: start rank 0 on {host}, copy them, or use "
            "--restart"
        )


def remark_on_machine(experiment: Experiment, world: World) -> None:
    """Say what a user would want to know of the machine before paying for hours of it. Collective.

    Raises UserError if it cannot compute as train.json demands.
    """
    config, device = experiment.config, world.device
    precision = Precision.resolve(config.precision, device)
    should_compile(config.compile, device)
    remarks = [idle_gpus(device, world.local_size), not_compiled(config.compile, device)]
    if precision.name != "fp32":  # kernels that round it are for half precision only
        remarks.append(rounded_dropout(experiment.model.drop_rates.attention_weights, device))
    remarks.append(unknown_peak(world.device_name))
    for remark in (*remarks, *world.gather(taken_by_others(device))):
        if remark is not None:
            say(world, f"note: {remark}")


def next_commands(experiment: Experiment) -> str:
    """The commands that tell whether a trained model is any good, to be typed as they stand."""
    run, data = experiment.run.path, shlex.quote(str(experiment.datasets_dir))
    where = "" if run.parent == Path("runs") else f" --runs-dir {shlex.quote(str(run.parent))}"
    return f"\nNext:\n  uv run test_smoke.py {run.name}{where}\n  uv run test_loss.py {data} {run.name}{where}"


def say(world: World, text: str) -> None:
    """Print a line once for all ranks."""
    if world.is_main:
        click.echo(text)


@contextmanager
def explained_failures(microbatch_size: int, stop: StopSignal) -> Iterator[None]:
    """Turn an out-of-memory on this rank, an operation that `deterministic` cannot have, or another rank's end into a
    line that says what to do, or into silence."""
    try:
        with leaving_with_peers():
            yield
    except PeerError:
        if stop.signal:  # torchrun has told us to go already
            raise RunStopped(stop.signal) from None
        raise
    except (RuntimeError, MemoryError) as error:
        if nondeterminism := explain_nondeterminism(error):
            raise UserError(nondeterminism) from None
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else "out of memory"
        raise RunError(
            f"out of memory with microbatch_size {microbatch_size} ({reason}); -f finds the largest that "
            "fits, and gradient_accumulation_steps keeps the global batch"
        ) from None
