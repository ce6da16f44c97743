"""Checks of a run's lock, dataset, checkpoint and plan. A run that fails a check is refused before a model is built."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from harness.common.device import idle_gpus
from harness.common.errors import UserError
from harness.common.lock import RunLock
from harness.common.options import TrainOptions
from harness.data.fetch import ensure_dataset
from harness.data.training_data import TrainingData
from harness.distributed.world import World, say
from harness.mirror.start import connect
from harness.mirror.upload import Uploads
from harness.model.kernels import not_compiled, should_compile, waiting_experts
from harness.model.precision import Precision
from harness.planning.experiment import Experiment, Position, changes_of_result, comparable_losses, first_difference
from harness.planning.plan import Plan, describe_start, make_plan
from harness.runs import checkpoints
from harness.runs.checkpoint_meta import CheckpointMeta, Provenance, TrainState, upgrade_notebook_meta
from harness.runs.directory import RunDirectory
from harness.runs.throughput import unknown_peak
from harness.runs.train_config import TrainConfig
from harness.training.clock import Clock


@dataclass(frozen=True, kw_only=True)
class PreparedRun(Plan):
    """The plan of a run, and all other inputs of training in this process. All are checked."""

    position: Position
    data: TrainingData
    provenance: Provenance  # recorded in checkpoints; read once, because the dataset's files may be replaced
    clock: Clock  # its seconds include those before the run was resumed
    lock: RunLock
    checkpoint: Path | None  # the checkpoint to resume from; None: start from scratch
    meta: CheckpointMeta | None  # the checkpoint's meta.json; for a notebook's checkpoint, missing keys are filled in
    is_from_notebook: bool  # the program of Giles Thomas's lab notebook wrote the checkpoint (runs/upstream.py)
    step_config: TrainConfig  # train.json with its precision resolved and its scaling rules applied
    uploads: Uploads  # sends to the run's mirror what rank 0 writes; does nothing on other ranks
    changed: list[str]  # changes that affect the result, made when this or an earlier process resumed the run

    @property
    def is_finished(self) -> bool:
        return self.meta is not None and self.position.is_finished and not self.unfinished_work

    def state(self, world: World) -> TrainState:
        """Return the TrainState that training starts with: the checkpoint's, or a new one if there is no checkpoint.
        Speed and validation losses are dropped if later ones are not comparable with them."""
        if self.meta is None:
            return TrainState()
        state = self.meta.state()
        if self.meta.last_step == self.meta.global_step != self.position.last_step:
            state.has_diverged = False  # the run had ended here, and has been extended
        if not self.meta.was_as_fast(world.size, world.device_name, self.provenance.train):
            state.measure_from_here(self.clock.seconds["training"])
        if self.is_from_notebook or not comparable_losses(self.meta, self.provenance):
            state.best_loss = state.best_step = state.val_loss = state.lowest_val_loss = None
        return state


def prepare(
    experiment: Experiment, world: World, clock: Clock, checkpoint: str | None, options: TrainOptions
) -> PreparedRun:
    """Return the checked inputs of training. Takes the run's lock and the mirror's lease, fetches missing data,
    verifies the checkpoint to resume from, and checks the plan. Collective.

    `checkpoint` is a folder name, "latest" or "best"; None: the latest checkpoint, fetched if only the mirror has it.
    Without any checkpoint, or with --restart, a new run begins. If torchrun has restarted a run that had begun,
    `checkpoint` and --restart have no effect.

    Adds the checkpoint's seconds and dollars to `clock`. Raises UserError or RunError if a check fails.
    """
    run, layout = experiment.run, experiment.layout(world.size)
    remark_on_machine(experiment, world)
    lock = world.on_rank0(run.lock)
    data = fetch_data(world, experiment)
    provenance = experiment.provenance(data)
    check_same_everywhere(experiment, world, provenance)

    mirrors = []

    def open_mirror() -> None:  # fills `mirrors`, because `on_rank0` would send a result to all ranks
        brings = not (lock.began_before or options.restart or checkpoint)
        mirrors.append(connect(experiment, provenance, options, brings=brings))

    world.on_rank0(open_mirror)

    def choose() -> tuple[Path, CheckpointMeta] | None:
        if lock.began_before:  # torchrun restarted this process; its first start has applied --restart or CHECKPOINT
            return checkpoints.open_start(run, None)
        return None if options.restart else checkpoints.open_start(run, checkpoint)

    path, meta = world.on_rank0(choose) or (None, None)
    if world.on_rank0(lambda: lock.began_before or not options.restart):
        refuse_wrong_machine(world, run)
    is_from_notebook = meta is not None and meta.is_from_notebook
    if path and meta:
        meta = upgrade_notebook_meta(path, meta, provenance, experiment.batches(layout))
        clock.add(meta.seconds, meta.costs)
    # make_plan also checks the run.
    plan = world.on_each_node(lambda: make_plan(experiment, world.size, meta))
    world.on_rank0(plan.check_disk)
    assert plan.position is not None, "the dataset is here"
    if not plan.position.is_finished or plan.unfinished_work:
        world.on_rank0(lambda: check_ceilings(experiment, clock, meta))
        world.on_rank0(run.check_outputs)
    if not plan.position.is_finished:
        for line in describe_start(plan):
            say(world, line)
    checkpoints.check_tokenizer(data.tokenizer)
    precision = world.broadcast(lambda: choose_precision(experiment.config, world.device, meta))
    here = {"world_size": world.size, "device": world.device_name, "precision": precision}
    here["accumulation_steps"] = layout.accumulation_steps
    changed = [*meta.changed] if meta else []
    if meta and (plan.unfinished_work or not plan.position.is_finished):
        changed += changes_of_result(meta, provenance.train, here, plan.position.last_step)
    mirror, lease = (mirrors[0] if mirrors else None) or (None, None)
    keep, start_step = experiment.config.keep_checkpoints, plan.position.first_step - 1
    uploads = Uploads(run, mirror, lease, keep=keep, start_step=start_step)
    return PreparedRun(
        **vars(plan),
        data=data,
        provenance=provenance,
        clock=clock,
        lock=lock,
        checkpoint=path,
        meta=meta,
        is_from_notebook=is_from_notebook,
        step_config=experiment.config.model_copy(update={**plan.scaled.values, "precision": precision}),
        uploads=uploads,
        changed=changed,
    )


def check_ceilings(experiment: Experiment, clock: Clock, meta: CheckpointMeta | None) -> None:
    """Raise UserError if the run, this start-up included, has reached train.json's max_hours or max_dollars."""
    for key, left in clock.ceilings(experiment.config).items():
        if left <= 0:
            value = f"{getattr(experiment.config, key):g}"
            said = (
                f"the run has reached {value} already; raise it to continue"
                if meta
                else f"start-up alone has reached {value}; raise it, or run the same command again"
            )
            raise UserError(f'{experiment.run.train_json}: key "{key}": {said}')


def choose_precision(config: TrainConfig, device: torch.device, meta: CheckpointMeta | None) -> str:
    """Return the name of the run's precision. `meta` is that of the checkpoint to resume from, or None.

    - train.json names a precision: this one. Raises UserError if this device does not support it.
    - "auto" in train.json and in the checkpoint: the precision that the checkpoint was trained in, if this device is
      of the same kind (CPU, GPU) and supports that precision.
    - all other cases: what `Precision.for_training` chooses for this device.
    """
    best = Precision.for_training(config.precision, device).name
    if config.precision != "auto" or meta is None or meta.device is None or meta.train.get("precision") != "auto":
        return best
    was_on_cpu = meta.device.endswith(" CPU")
    if was_on_cpu != (device.type == "cpu"):
        return best
    # A move to another processor must not silently change the results.
    begun = meta.precision or (Precision.resolve("auto", device).name if was_on_cpu else best)
    try:
        return Precision.resolve(begun, device).name
    except UserError:  # this GPU does not support the earlier precision
        return best


def fetch_data(world: World, experiment: Experiment) -> TrainingData:
    """Return the experiment's data on every rank. If a dataset is missing, the first process of each node downloads or
    builds it. Collective. Raises UserError or PeerError if a dataset cannot be obtained or used."""
    for name in experiment.config.dataset_weights:
        world.on_each_node(partial(ensure_dataset, experiment.datasets_dir, name, experiment.splits))
    return experiment.open_data()


def check_same_everywhere(experiment: Experiment, world: World, provenance: Provenance) -> None:
    """Raise UserError on every rank if the model, train.json or the dataset, as `provenance` records them, differ
    between any rank and rank 0. Collective."""
    machines = world.gather((socket.gethostname(), provenance))
    (first_host, expected), *others = machines
    files = (("model", experiment.run.model_json), ("train", experiment.run.train_json), ("dataset", "dataset"))
    for rank, (host, found) in enumerate(others, start=1):
        for part, file in files:
            difference = first_difference(getattr(expected, part), getattr(found, part))
            if difference:
                raise UserError(
                    f"{file}: not the same on {first_host} (rank 0) and {host} (rank {rank}): {difference}; "
                    "make them equal"
                )


def refuse_wrong_machine(world: World, run: RunDirectory) -> None:
    """Raise UserError on every rank if another machine has later checkpoints of this run than rank 0's machine, because
    the ranks would train those steps again. Collective."""
    steps = [at for at, _ in checkpoints.list_checkpoints(run.checkpoints)]
    (newest, _), *others = world.gather((max(steps, default=-1), socket.gethostname()))
    found, host = max(others, default=(newest, ""))
    if found > newest:
        raise UserError(
            f"{run.checkpoints}: {host} has checkpoints up to step {found:,}, but rank 0 is on another machine, which "
            f"{f'has none after step {newest:,}' if newest >= 0 else 'has none'}: start rank 0 on {host}, or copy "
            f"them to rank 0's machine; to train without them, move them away on {host}, or use --restart"
        )


def remark_on_machine(experiment: Experiment, world: World) -> None:
    """Print notes about the machine that a user should read before paying for hours of it, such as idle GPUs.
    Collective. Raises UserError if this machine cannot compute what train.json demands."""
    config, device = experiment.config, world.device
    precision = Precision.resolve(config.precision, device)
    should_compile(config.compile, device)
    remarks = [idle_gpus(device, world.local_size), not_compiled(config.compile, device)]
    if config.attention != "auto" and device.type == "cpu":
        remarks.append(f'"attention": "{config.attention}" in train.json has no effect on a CPU')
    if experiment.model.moe is not None:
        remarks.append(waiting_experts(device, precision.name))
    remarks.append(unknown_peak(world.device_name))
    for remark in (*remarks, *world.gather(world.taken)):
        if remark is not None:
            say(world, f"note: {remark}")
