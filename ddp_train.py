"""Train a GPT-2-class model: a run directory in, a trained and measured model out.

One process per device under torchrun, or plain `python` on one device. Modules that need torch are imported where they
are used, so that --help answers at once.
"""

from __future__ import annotations

import json
import socket
import tempfile
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.common.errors import RunStopped, UserError, one_line_errors, say_last
from harness.common.lasting_output import outlive_readers
from harness.common.launcher import end_with_torchrun
from harness.common.libraries import configure_libraries
from harness.common.options import POSITIVE, Command, check_options
from harness.distributed.signals import described
from harness.distributed.watchdog import Place

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gpt import GPTModel
    from harness.data.dataset import Dataset
    from harness.distributed.world import World
    from harness.runs.checkpoint_meta import CheckpointMeta
    from harness.runs.directory import RunDirectory
    from harness.runs.experiment import Experiment, Position
    from harness.training.clock import Clock
    from harness.training.job import Job
    from harness.training.loss_meter import TrainMetrics
    from harness.training.step import OptimizerStep


LONG_STEP_SECONDS = 2


class Trainer:
    """The training loop. `job` holds everything it drives; every method is called on every rank."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.state = job.state
        self.last_step = job.position.total_steps - 1

    def train(self) -> None:
        """Run all steps that are left; raises RunStopped if a signal asked for an early end."""
        job = self.job
        job.stop.listen()
        outlive_readers(job.stop.hang_up)
        job.console.start()
        job.world.watchdog.is_stopping = lambda: bool(job.stop.signal)
        if job.due:  # a signal came in the middle of it
            self.after_step(job.position.first_step - 1, first=job.due)
        # Whether any rank was asked to stop is found out while the next step computes.
        vote, seconds = job.world.async_max(job.stop.signal, 0), 0.0
        for step in range(job.position.first_step, job.position.total_steps):
            stop_signal, longest = vote.result()
            if stop_signal:
                self.stop(stop_signal)
            job.writer.check()
            vote, began = job.world.async_max(job.stop.signal, int(seconds)), time.monotonic()
            with job.clock.phase("training"):
                self.train_step(step)
                if self.is_reporting_step(step):
                    self.report(step)
            seconds = time.monotonic() - began
            self.after_step(step)
            if longest >= LONG_STEP_SECONDS:  # the same on all ranks; then they wait for one another, and lose nothing
                self.stop_if_asked(step)
        vote.result()

    def stop_if_asked(self, step: int) -> None:
        """Find out now whether a rank was asked to stop: torchrun kills after 30 seconds."""
        asked = max(self.job.world.gather(self.job.stop.signal))
        if asked and step != self.last_step:
            self.stop(asked)

    def after_step(self, step: int, *, first: str = "validation") -> None:
        """What is due after a step, from `first` on; all of it before the checkpoint, so that that knows of it."""
        if first == "validation" and self.is_validation_step(step):
            self.validate()
        if self.is_due(step, self.job.config.benchmark_interval):
            self.benchmark()
        if self.is_due(step, self.job.config.sample_interval):
            self.job.world.on_rank0(self.job.print_sample)
        if self.is_checkpoint_step(step):
            self.checkpoint(step)
        elif self.is_due(step, self.job.config.weights_check_interval):
            self.job.check_weights()

    def train_step(self, step: int) -> None:
        job = self.job
        with job.world.watchdog.guard(Place(step, "step")):
            windows = job.loader.microbatches(step - job.position.first_step, job.world.rank)
            job.meter.add(job.step.run(windows, job.schedule.multiplier(step)))
        self.state.global_step = step
        self.state.tokens_seen += job.shape.global_tokens
        job.console.advance()

    def is_due(self, step: int, interval: int | None) -> bool:
        """Decided from the global step alone, so that every rank decides alike."""
        return interval is not None and (step % interval == 0 or step == self.last_step)

    def is_validation_step(self, step: int) -> bool:
        return self.is_due(step, self.job.config.validation_interval)

    def is_checkpoint_step(self, step: int) -> bool:
        return self.is_due(step, self.job.config.checkpoint_every)

    def is_reporting_step(self, step: int) -> bool:
        # A validation or checkpoint waits for the device anyway, and wants to know the loss up to here.
        intervals = (
            self.job.config.report_interval,
            self.job.config.validation_interval,
            self.job.config.checkpoint_every,
        )
        return any(self.is_due(step, interval) for interval in intervals)

    def report(self, step: int) -> None:
        with self.job.world.watchdog.guard(Place(step, "report")):
            self.job.meter.synchronize()
        report = self.job.meter.report(self.job.world)
        self.state.train_loss = report.loss
        self.state.loss_sum += report.loss * report.microbatches
        self.state.loss_count += report.microbatches
        self.state.skipped_steps += report.skipped_steps
        self.job.record_report(report)
        self.refuse_divergence(step, report)

    def refuse_divergence(self, step: int, report: TrainMetrics) -> None:
        """Every rank has the same report, and so comes to the same end."""
        if report.skipped_in_a_row >= self.job.config.max_skipped_steps:
            raise self.job.world.collective_error(
                f"gradients were not finite in {report.skipped_in_a_row} steps in a row up to global step {step} "
                "(train.json: max_skipped_steps); lower learning_rate or set clipping_max_norm, and go back to an "
                "earlier checkpoint by its name"
            )

    def validate(self) -> None:
        with self.job.clock.phase("validation"):
            loss = self.job.validate()
        if loss is None:  # torchrun kills after 30 seconds: no time to wait for the end
            self.stop(max(self.job.world.gather(self.job.stop.signal)), due="validation")
        else:
            self.state.val_loss = loss
            self.job.record_validation(loss)

    def benchmark(self) -> None:
        with self.job.clock.phase("benchmarks"):
            scores = self.job.benchmark()
        if scores is None:
            self.stop(max(self.job.world.gather(self.job.stop.signal)), due="benchmarks")
        else:
            self.job.record_benchmarks(scores)

    def checkpoint(self, step: int) -> None:
        """Save, and point `best` here if the loss that decides is the lowest yet."""
        job, state = self.job, self.state
        state.train_loss = state.loss_sum / state.loss_count if state.loss_count else None
        deciding = state.train_loss
        if job.config.validates:
            deciding = state.val_loss if self.is_validation_step(step) else None
        is_best = deciding is not None and deciding < (state.best_loss if state.best_loss is not None else float("inf"))
        if is_best:
            state.best_loss, state.best_step = deciding, step
        state.loss_sum, state.loss_count = 0.0, 0
        job.save(is_best=is_best, planned=True)
        self.stop_if_asked(step)  # meanwhile; no further step, and no further save

    def stop(self, signal_number: int, *, due: str | None = None) -> None:
        """Leave a checkpoint of the last step done, wherever it fell, and say how to go on."""
        job, step = self.job, self.state.global_step
        if due or (step >= job.position.first_step and not self.is_checkpoint_step(step)):
            job.save(due=due)
        job.finish_saving()
        done = f"after global step {step}" if step >= 0 else "before the first step"
        job.console.close()
        if job.world.is_main:
            remedy = "to continue, run the same command again (without --restart or a CHECKPOINT)"
            say_last(f"stopped by {described(signal_number)} {done}; {remedy}")
        job.world.barrier()
        raise RunStopped(signal_number)


@click.command(cls=Command)
@click.argument("run")
@click.argument("datasets_dir", type=click.Path(path_type=Path))
@click.argument("checkpoint", required=False)
@click.option(
    "-f", "--find-max-microbatch-size", "find", is_flag=True, help="Find the largest microbatch that fits; no training."
)
@click.option("--memory-limit-gib", type=POSITIVE, help="With -f: as if a device had G GiB.")
@click.option("--write", is_flag=True, help="With -f: put the result into train.json.")
@click.option("--plan", is_flag=True, help="Print what the command would do and cost; no training, no download.")
@click.option("--assume-tps", type=POSITIVE, help="With --plan: tokens per second of training alone.")
@click.option(
    "--assume-tps-with-validation", type=POSITIVE, help="With --plan: tokens per second, validation's time counted."
)
@click.option("--assume-world-size", type=click.IntRange(min=1), help="With --plan: as if there were N ranks.")
@click.option("--restart", is_flag=True, help="Move earlier results to RUN/aside and start again.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option(
    "--schema",
    type=click.Choice(["train", "model"]),
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, kind: print_schema(context, kind),
    help="Print the JSON Schema of train.json or model.json, for editors.",
)
def main(run: str, datasets_dir: Path, checkpoint: str | None, **options: Any) -> None:
    """Train RUN (a folder in runs/ with model.json and train.json) on its dataset, kept in DATASETS_DIR.

    The same command starts a run, continues an unfinished one from its latest checkpoint, and does nothing to a
    finished one. CHECKPOINT is a folder name in runs/RUN/checkpoints, `latest` or `best`: training continues there, and
    what came after it is moved aside.

    \b
    On all GPUs of a machine:
        uv run torchrun --nproc_per_node=8 ddp_train.py 8xa100m40 datasets
    """
    end_with_torchrun()
    configure_libraries()
    with one_line_errors():
        check_options(checkpoint, options)
        from harness.data.fetch import check_obtainable
        from harness.distributed.environment import local_rank, place
        from harness.runs.directory import RunDirectory
        from harness.runs.experiment import Experiment

        place()  # first: a launcher's leftovers would make this another run than was meant
        found = RunDirectory.find(options["runs_dir"], run)
        experiment = Experiment.load(found, datasets_dir)
        # One process of each machine asks the Hub, as one will download.
        ask_hub = not options["plan"] and local_rank() == 0
        check_obtainable(datasets_dir, experiment.config.dataset, experiment.splits, ask_hub=ask_hub)
        if options["plan"]:
            print_plan(experiment, checkpoint, options)
            return
        say_start(experiment)
        if options["find"]:
            find_max_microbatch(experiment, options["memory_limit_gib"], write=options["write"])
        else:
            train(experiment, checkpoint, restart=options["restart"])


def say_start(experiment: Experiment) -> None:
    """The next line takes seconds: torch is loaded, and the processes meet."""
    from harness.distributed.environment import is_rank0, world_size

    if is_rank0():
        count = world_size()
        click.echo(f"{experiment.run.path.name}: starting {count} {'process' if count == 1 else 'processes'}")


def print_schema(context: click.Context, kind: str | None) -> None:
    if kind is None:
        return
    from harness.common.json_files import json_schema
    from harness.model.config import ModelConfig
    from harness.runs.train_config import TrainConfig

    click.echo(json.dumps(json_schema(TrainConfig if kind == "train" else ModelConfig), indent=2))
    context.exit()


def print_plan(experiment: Experiment, checkpoint: str | None, options: dict[str, Any]) -> None:
    from harness.distributed.environment import is_rank0, world_size
    from harness.model.tensor_names import check_weights_file
    from harness.runs.plan import assumed_speed, describe_plan, make_plan, plan_speed, planned_start

    if not is_rank0():
        return
    ranks = options["assume_world_size"] or world_size()
    meta = None if options["restart"] else planned_start(experiment, ranks, checkpoint)
    plan = make_plan(experiment, ranks, meta)
    if plan.initial_weights is not None:
        check_weights_file(plan.initial_weights, experiment.model)
    assumed = assumed_speed(options["assume_tps"], options["assume_tps_with_validation"])
    click.echo(describe_plan(plan, experiment.model, plan_speed(experiment, plan.shape, assumed)))
    if options["assume_world_size"] is None:  # else it is another machine's disk that counts
        plan.check_disk(experiment.run.path)


def find_max_microbatch(experiment: Experiment, memory_limit_gib: float | None, *, write: bool) -> None:
    from harness.data.dataset import check_token_ids
    from harness.distributed.world import World
    from harness.training.batch_size_finder import find_max_microbatch, load_libraries, write_microbatch_size
    from harness.training.rehearsal import Rehearsal
    from harness.training.startup import fetch_dataset

    world = World.start()
    remark_on_machine(experiment, world)
    dataset = fetch_dataset(world, experiment.datasets_dir, experiment.config.dataset, experiment.splits)
    world.on_each_node(lambda: check_token_ids(dataset, "train", experiment.model.vocab_size))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as first:
        tiny = experiment.tiny()
        load_libraries(tiny, world, dataset, Rehearsal(world, partial(build_rehearsal, tiny, dataset, Path(first))))
        rehearsal = Rehearsal(world, partial(build_rehearsal, experiment, dataset, Path(folder)))
        found = find_max_microbatch(experiment, world, dataset, rehearsal, memory_limit_gib)
    remark_on_validation(experiment, found, world, dataset)
    if write:
        written = world.on_rank0(lambda: write_microbatch_size(experiment, found, world.size))
        if world.is_main:
            click.echo(f"{experiment.run.train_json}: microbatch_size is now {written}")
    world.stop()


def build_rehearsal(experiment: Experiment, dataset: Dataset, folder: Path, world: World) -> Job:
    """A job of one sequence a step that leaves its results in `folder`."""
    from harness.runs.directory import RunDirectory
    from harness.runs.experiment import Position
    from harness.training.clock import Clock

    small = {"microbatch_size": 1, "gradient_accumulation_steps": 1, "global_batch_size": None}
    alone = replace(experiment, run=RunDirectory(folder), config=experiment.config.model_copy(update=small))
    # As many steps as any schedule needs.
    return build_job(alone, world, dataset, Clock(), Position(0, 2**40, experiment.config.start_train_token, 0))


def train(experiment: Experiment, checkpoint: str | None, *, restart: bool) -> None:
    """Start, continue, or find that there is nothing left to do."""
    from harness.distributed.signals import StopSignal
    from harness.distributed.world import World
    from harness.runs import checkpoints
    from harness.runs.checkpoint_meta import upgrade_notebook_meta
    from harness.runs.plan import make_plan
    from harness.training.clock import Clock
    from harness.training.job import explained_failures
    from harness.training.startup import check_same_everywhere, fetch_dataset

    clock, world, run = Clock(), World.start(), experiment.run
    remark_on_machine(experiment, world)
    lock = world.on_rank0(run.lock)
    dataset = fetch_dataset(world, experiment.datasets_dir, experiment.config.dataset, experiment.splits)
    check_same_everywhere(experiment, world, dataset)

    def choose_start() -> tuple[Path, CheckpointMeta] | None:
        if lock.began_before:  # torchrun has restarted its workers: what the user asked for was done the first time
            return checkpoints.open_start(run.checkpoints, None)
        return None if restart else checkpoints.open_start(run.checkpoints, checkpoint)

    start, meta = world.on_rank0(choose_start) or (None, None)
    if world.on_rank0(lambda: lock.began_before or not restart):
        refuse_wrong_machine(world, run)
    if meta:
        meta = upgrade_notebook_meta(meta, experiment.provenance(dataset), experiment.shape(world.size).global_tokens)
        clock.add(meta.seconds)
    # The plan's checks are the run's: short data, unknown tokens, a long warm-up or a full disk end it here.
    plan = world.on_each_node(lambda: make_plan(experiment, world.size, meta))
    world.on_rank0(lambda: plan.check_disk(run.path))
    position = plan.position
    assert position is not None, "the dataset is here"
    if meta and position.is_finished and not meta.due:
        say(world, f"{run.path.name} is finished: {position.first_step:,} global steps; --restart trains it again")
        if start and checkpoint is None:
            world.on_rank0(partial(rewind, run, start, meta))  # a kill in the last save may not have left it so
        restore_summary(experiment, world, meta)
    else:
        stop = StopSignal()
        with explained_failures(experiment.config.microbatch_size, stop):
            job = build_job(experiment, world, dataset, clock, position)
            job.stop = stop
            job.load_benchmarks()
            begin(job, start)
            world.on_rank0(lock.note_begun)
            with job.saving_to_the_end():
                Trainer(job).train()
            job.finish()
        say(world, next_commands(experiment))
    world.stop()


def remark_on_machine(experiment: Experiment, world: World) -> None:
    """Say what a user would want to know of the machine before paying for hours of it."""
    from harness.common.device import idle_gpus
    from harness.model.kernels import not_compiled

    for remark in (idle_gpus(world.device, world.local_size), not_compiled(experiment.config.compile, world.device)):
        if remark is not None:
            say(world, f"note: {remark}")


def remark_on_validation(experiment: Experiment, microbatch_size: int, world: World, dataset: Dataset) -> None:
    """Say what else training with this microbatch wants: a microbatch that fits the memory may be too large for the
    validation split."""
    config = experiment.config.model_copy(update={"microbatch_size": microbatch_size})
    changed = replace(experiment, config=config)
    try:
        changed.check_validation_slice(changed.shape(world.size), dataset)
    except UserError as error:
        say(world, f"note: with a microbatch of {microbatch_size}, {error}")


def next_commands(experiment: Experiment) -> str:
    """The commands that tell whether a trained model is any good, to be typed as they stand."""
    run = experiment.run
    name = "best" if (run.checkpoints / "best").exists() else "latest"
    model = f"{run.model_json} {run.checkpoints / name / 'model.safetensors'}"
    return f"\nNext:\n  uv run test_smoke.py {model}\n  uv run test_loss.py {experiment.datasets_dir} {model}"


def refuse_wrong_machine(world: World, run: RunDirectory) -> None:
    """Raises UserError if another machine than rank 0's has later checkpoints of this run, which would start again."""
    from harness.runs import checkpoints

    steps = [at for at, _ in checkpoints.list_checkpoints(run.checkpoints)]
    (newest, _), *others = world.gather((max(steps, default=-1), socket.gethostname()))
    found, host = max(others, default=(newest, ""))
    if found > newest:
        raise UserError(
            f"{run.checkpoints}: {host} has checkpoints up to step {found:,}, but rank 0 is on another machine, which "
            f"{f'ends at step {newest:,}' if newest >= 0 else 'has none'}: start rank 0 on {host}, copy them, or use "
            "--restart"
        )


def restore_summary(experiment: Experiment, world: World, meta: CheckpointMeta) -> None:
    """Write the summary of a finished run whose process ended before it could, from the last checkpoint."""
    from harness.runs.checkpoint_meta import Provenance, as_recorded
    from harness.runs.metrics import PHASES
    from harness.runs.summary import Outcome, summarise, write_summary
    from harness.runs.throughput import Throughput, peak_flops
    from harness.training.startup import measure_machine

    if experiment.run.summary.exists() or not meta.seconds:  # nothing of it was trained here
        return
    # Not necessarily those of today.
    machine, shape = as_recorded(measure_machine(world), meta), as_recorded(experiment.shape(world.size), meta)
    speed = Throughput(experiment.model.flops_per_token, peak_flops(machine.device), experiment.config.price_per_hour)
    seconds = dict.fromkeys(PHASES, 0.0) | meta.seconds
    provenance = Provenance(meta.model or {}, experiment.model.parameters, meta.train, meta.dataset or {})
    outcome = Outcome(meta.state(), seconds, speed, machine, shape)
    summary = summarise(experiment.run.path.name, outcome, provenance)
    world.on_rank0(lambda: write_summary(experiment.run, summary))


def begin(job: Job, start: Path | None) -> None:
    """Put the job where the checkpoint at `start` left it, or make way for a run from the beginning."""
    from harness.runs import checkpoints
    from harness.runs.experiment import changed_settings

    world, run, position = job.world, job.run, job.position
    left = f"{position.total_steps - position.first_step:,} global steps of {job.shape.global_tokens:,} tokens"
    if start is None:
        initial = load_initial_weights(job)
        aside = world.on_rank0(run.set_results_aside)
        if aside:
            say(world, f"Earlier results are now in {aside}")
        size = f"{job.provenance.parameters:,} parameters, {world.size} x {world.device.type}"
        say(world, f"{run.path.name}: {size}, {left}")
        say_where(job)
        if initial:
            say(world, f"  starting from {job.config.initial_weights}")
        job.begin()
        return
    saved = checkpoints.Checkpoint(**world.broadcast(lambda: vars(checkpoints.load_checkpoint(start))))
    job.resume(saved, start)
    job.protected.add(start.name)
    say(world, f"{run.path.name}: continuing from {start.name}, {left} to go")
    say_where(job)
    if saved.meta.is_notebooks:
        taken = "weights and optimizer" if saved.optimizer else "weights"
        say(world, f"  not written by this program: its {taken} are taken, and {position.tokens_seen:,} tokens are")
        say(world, "  counted as seen: its global steps, with this run's batch")
    for change in changed_settings(saved.meta, job.provenance):
        say(world, f"  train.json has changed since: {change}")
    world.on_rank0(lambda: rewind(run, start, saved.meta))


def load_initial_weights(job: Job) -> bool:
    """Give the model the weights that train.json names, if it does; rank 0 reads them for all."""
    from harness.model.weights import load_weights

    if job.config.initial_weights is None:
        return False
    path = job.run.path / job.config.initial_weights
    job.model.load_checkpoint_tensors(job.world.broadcast(lambda: load_weights(path)), path)
    return True


def rewind(run: RunDirectory, start: Path, meta: CheckpointMeta) -> None:
    """Make links and metrics those of the checkpoint `start`, wherever the process that saved it ended; what came after
    it is kept aside. Rank 0 only."""
    from harness.runs import checkpoints
    from harness.runs.metrics import MetricsFile

    make_aside = cache(run.new_aside)  # one folder for all of it, if there is anything
    if checkpoints.rewind_to(run.checkpoints, start, make_aside):
        run.set_pictures_aside(make_aside())
    MetricsFile(run.metrics).rewind_to(meta, make_aside)


def say_where(job: Job) -> None:
    """On several machines: which one has the results, and what continuing will need."""
    if not job.world.is_one_machine:
        place = f"{socket.gethostname()}:{job.run.path.resolve()}"
        say(job.world, f"  results and checkpoints are written by rank 0 alone, to {place}; to continue later,")
        say(job.world, "  start rank 0 where that folder is")


def say(world: World, text: str) -> None:
    if world.is_main:
        click.echo(text)


def build_bare_step(experiment: Experiment, device: torch.device) -> OptimizerStep:
    """Model, optimizer and step on one device."""
    from harness.training.step import build_step

    model = build_model(experiment, device)
    return build_step(model, model, experiment.config)


def build_model(experiment: Experiment, device: torch.device) -> GPTModel:
    """The model on one device. The same weights on every rank."""
    from gpt import GPTModel
    from harness.common.memory import give_back_at_once
    from harness.model.kernels import attend_with_exact_dropout, should_compile
    from harness.training.rng import seed_alike

    config = experiment.config
    if device.type == "cpu":
        give_back_at_once()
    seed_alike(config.random_seed)
    model = GPTModel(experiment.model, recompute_blocks=config.activation_checkpointing).to(device)
    attend_with_exact_dropout(experiment.model.drop_rate, device)
    if should_compile(config.compile, device):
        model.compile()  # in place: the module and its parameters keep their names
    return model


def build_job(experiment: Experiment, world: World, dataset: Dataset, clock: Clock, position: Position) -> Job:
    """Everything the loop drives, with fresh weights."""
    from torch.nn.parallel import DistributedDataParallel

    from harness.runs import checkpoints
    from harness.runs.schedule import build_schedule
    from harness.runs.throughput import Throughput, peak_flops
    from harness.training.async_writer import AsyncWriter, SyncWriter
    from harness.training.job import Job
    from harness.training.step import build_step

    run, config, shape = experiment.run, experiment.config, experiment.shape(world.size)
    checkpoints.check_tokenizer(dataset.tokenizer)
    model = build_model(experiment, world.device)
    trained: nn.Module = model
    if world.size > 1:
        devices = [world.device] if world.device.type == "cuda" else None
        trained = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    step = build_step(model, trained, config, before_exchange=world.watchdog.beat)

    def write_checkpoint(parts: dict[str, Any], protected: set[str]) -> None:
        path = checkpoints.save_checkpoint(run.checkpoints, checkpoints.Checkpoint(**parts))
        if config.keep_checkpoints is not None:
            checkpoints.prune(run.checkpoints, config.keep_checkpoints, {path.name} | protected)

    return Job(
        world=world,
        run=run,
        config=config,
        dataset=dataset,
        shape=shape,
        position=position,
        schedule=build_schedule(config, position.total_steps),
        model=model,
        step=step,
        speed=Throughput(experiment.model.flops_per_token, peak_flops(world.device_name), config.price_per_hour),
        clock=clock,
        provenance=experiment.provenance(dataset),
        write_checkpoint=write_checkpoint,
        writer=AsyncWriter() if config.async_checkpoint else SyncWriter(),
    )


if __name__ == "__main__":
    main()
