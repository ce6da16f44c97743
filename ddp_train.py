"""Train a GPT-2-class model from a run directory, and write the trained model and its measurements there.

`Trainer` is the training loop; `Trainer.after_step` does what is due after a step. Every device has one process, which
--processes or torchrun starts; for a single device plain `python` is enough. Modules that need torch are imported
inside functions, so that --help, --plan and errors in the run's files do not wait for torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.common.errors import RunStopped, UserError, one_line_errors, survive_closed_output
from harness.common.libraries import configure_libraries, load
from harness.common.options import POSITIVE, RUNS_DIR, Command, TrainOptions
from harness.common.processes import exit_when_launcher_dies
from harness.distributed.signals import StopSignal
from harness.distributed.watchdog import Place
from harness.planning.intervals import due_after

if TYPE_CHECKING:
    from checkpointing import Checkpointer
    from harness.data.loader import TokenLoader
    from harness.distributed.world import World
    from harness.planning.experiment import Experiment
    from harness.planning.rates import Rates
    from harness.runs.checkpoint_meta import TrainState
    from harness.training.evaluations import Evaluations
    from harness.training.loss_meter import LossMeter
    from harness.training.reporter import Reporter
    from harness.training.startup import PreparedRun
    from harness.training.step import OptimizerStep


@dataclass
class Trainer:
    """Training loop. Every method is called on every rank; `reporter` and `checkpointer` write on rank 0 only."""

    prepared: PreparedRun
    world: World
    stop: StopSignal
    state: TrainState
    loader: TokenLoader
    rates: Rates
    optimizer_step: OptimizerStep
    meter: LossMeter
    evaluations: Evaluations
    reporter: Reporter
    checkpointer: Checkpointer

    def train(self) -> None:
        """Run the remaining steps. If a signal asks any rank to stop, save a checkpoint and raise RunStopped."""
        self.stop.listen()
        survive_closed_output(self.stop.hang_up)
        self.reporter.console.start()
        steps = range(self.prepared.position.first_step, self.prepared.position.total_steps)
        try:
            if self.prepared.interrupted_in:  # a signal interrupted the work after the last step
                self.after_step(self.state.global_step, first=self.prepared.interrupted_in)
            for step in self.stop.steps(self.world, steps, between=self.checkpointer.writer.check):
                self.train_step(step)
                self.after_step(step)
            self.checkpointer.finish()
        except RunStopped as request:
            self.checkpointer.save_interrupted(self.state, request.during)
            self.reporter.stopped(request.signal, self.state)
            self.world.barrier()
            raise

    def train_step(self, step: int) -> None:
        """Update the weights once: run forward and backward over this rank's microbatches, exchange the gradients
        during the last one, clip them and apply them (`OptimizerStep.run`). A GPU may still be computing when this
        returns."""
        with self.prepared.clock.phase("training"), self.world.watchdog.guard(Place(step, "step")):
            done = step - self.prepared.position.first_step
            microbatches = self.loader.microbatches(done, self.world.rank)
            batch_tokens = self.loader.batches.at(done).global_tokens
            rate, decay = self.rates.at(step, batch_tokens)
            self.meter.add(self.optimizer_step.run(microbatches, rate, decay))
        self.state.global_step = step
        self.state.tokens_seen += batch_tokens
        self.reporter.console.advance()

    def after_step(self, step: int, *, first: str = "report") -> None:
        """Do the work that is due after global step `step`, beginning with `first` (a name that `due_after` returns).
        The checkpoint comes last, because it records the results of the other work."""
        due = due_after(step, self.prepared.position, self.prepared.experiment.config, first=first)
        if "report" in due:
            self.report(step)
        if "validation" in due:
            with self.prepared.clock.phase("validation"):
                self.state.val_loss = self.evaluations.validation_loss(step)
            self.reporter.validation(self.state.val_loss, self.state)
        if "benchmarks" in due:
            with self.prepared.clock.phase("benchmarks"):
                scores = self.evaluations.benchmark_scores(step)
            self.reporter.benchmarks(scores, self.state)
        if "sample" in due:
            self.reporter.sample(self.evaluations.sample(), self.state)
        if "checkpoint" in due:
            self.checkpointer.save(self.state)
            if step != self.prepared.position.last_step:
                self.stop.raise_if_set(self.world)  # a save is slow, and torchrun kills 30 s after a signal
        elif "weights_check" in due:
            self.checkpointer.check_weights(self.state)

    def report(self, step: int) -> None:
        """Wait for the device, then report the losses since the last report. Raises RunError if the gradients of too
        many steps in a row were not finite."""
        with self.prepared.clock.phase("training"):
            with self.world.watchdog.guard(Place(step, "report")):
                self.meter.synchronize()
            metrics = self.meter.reduce(self.world)
            self.state.add_report(metrics.loss, metrics.microbatches, metrics.skipped_steps)
            self.reporter.training(metrics, self.state, self.optimizer_step.optimizer.learning_rate)
        metrics.check_skipped_steps(step, self.prepared.experiment.config.max_skipped_steps, self.world)


def print_schema(context: click.Context, _: click.Parameter, kind: str | None) -> None:
    """Print the JSON Schema of train.json or model.json and exit; return if `kind` is None. A click callback."""
    if kind is None:
        return
    from harness.common.json_files import json_schema
    from harness.model.config import ModelConfig
    from harness.runs.train_config import TrainConfig

    click.echo(json.dumps(json_schema(TrainConfig if kind == "train" else ModelConfig), indent=2))
    context.exit()


@click.command(cls=Command)
@click.argument("run")
@click.argument("datasets_dir", type=click.Path(path_type=Path))
@click.argument("checkpoints", nargs=-1, metavar="[CHECKPOINT]")
@click.option("--processes", type=click.IntRange(1, 1024), help="Train with N processes, a GPU or CPU cores for each.")
@click.option(
    "-f", "--find-max-microbatch-size", "find", is_flag=True, help="Find the largest microbatch that fits; no training."
)
@click.option("--memory-limit-gib", type=POSITIVE, help="With -f: as if a device had G GiB.")
@click.option("--write", is_flag=True, help="With -f: put the result into train.json.")
@click.option("--plan", is_flag=True, help="Print what the command would do and cost; no training, no download.")
@click.option("--assume-tps", type=POSITIVE, help="With --plan: tokens per second of training alone.")
@click.option("--assume-tps-with-validation", type=POSITIVE, help="With --plan: tokens per second, with validation.")
@click.option("--assume-world-size", type=click.IntRange(min=1), help="With --plan: as if there were N ranks.")
@click.option("--assume-device", help="With --plan: estimate the speed on such a GPU, like H100.")
@click.option("--restart", is_flag=True, help="Move earlier results to RUN/aside and start again.")
@RUNS_DIR
@click.option(
    "--schema",
    type=click.Choice(["train", "model"]),
    is_eager=True,
    expose_value=False,
    callback=print_schema,
    help="Print the JSON Schema of train.json or model.json, for editors.",
)
def main(run: str, datasets_dir: Path, checkpoints: tuple[str, ...], **given: Any) -> None:
    """Train RUN (a folder in runs/ with model.json and train.json) on its dataset, kept in DATASETS_DIR.

    The same command starts a run, continues an unfinished one from its latest checkpoint, and does nothing to a
    finished one. CHECKPOINT is a folder name in runs/RUN/checkpoints, `latest` or `best`: training continues from it,
    and later results are moved to runs/RUN/aside.

    \b
    On all GPUs of a machine, or of several with torchrun on each:
        uv run ddp_train.py 8xa100m40 datasets --processes 8
        uv run torchrun --nproc_per_node=8 ddp_train.py 8xa100m40 datasets
    """
    exit_when_launcher_dies()
    with one_line_errors():
        if len(checkpoints) > 1 or (datasets_dir / "train.json").is_file() or "*" in run:
            raise UserError(f"{run}, {datasets_dir}, …: one run at a time; sweep_runs.py trains several")
        checkpoint = checkpoints[0] if checkpoints else None
        options = TrainOptions(**given)
        options.check(checkpoint)
        from harness.distributed.environment import ranks_to_start, read_ranking, run_ranks, unblock_stopping_signals
        from harness.planning.experiment import Experiment
        from harness.runs.directory import RunDirectory

        unblock_stopping_signals()
        here = read_ranking()  # first: stale RANK variables would make this a different job
        to_start = ranks_to_start(options.processes)
        found = RunDirectory.find(options.runs_dir, run)
        experiment = Experiment.load(found, datasets_dir)
        experiment.check_dataset(ask_hub=not options.plan and here.local_rank == 0)  # one process per machine asks
        if options.plan:
            from harness.planning.plan import print_plan

            if here.rank == 0:
                print_plan(experiment, checkpoint, options.processes or here.world_size, options)
            return
        if to_start:
            run_ranks(to_start)
        configure_libraries()
        if here.rank == 0:  # printed before torch is imported and the ranks connect, which takes seconds
            count = here.world_size
            print(f"{found.path.name}: starting {count} {'process' if count == 1 else 'processes'}", flush=True)
        load("torch")
        if experiment.config.deterministic:
            from harness.model.kernels import compute_deterministically

            compute_deterministically()  # before anything uses CUDA
        if options.find:
            from harness.training.batch_size_finder import report_max_microbatch

            report_max_microbatch(experiment, options.memory_limit_gib, write=options.write)
        else:
            train(experiment, checkpoint, options)


def train(experiment: Experiment, checkpoint: str | None, options: TrainOptions) -> None:
    """Start or resume training. For a finished run, complete whatever a killed process left undone."""
    from checkpointing import finish_already_trained
    from harness.distributed.world import World
    from harness.training import startup

    clock, stop = startup.Clock(), StopSignal()
    world = World.join(is_stopping=stop.is_set)  # its signal handlers are installed later, in Trainer.train
    prepared = startup.prepare(experiment, world, clock, checkpoint, options)
    if prepared.is_finished:
        finish_already_trained(prepared, world, named=checkpoint is not None)
    else:
        with startup.explained_failures(experiment.config.microbatch_size, stop):
            trainer = build_trainer(prepared, world, stop)
            trainer.checkpointer.restore(trainer.loader)
            world.on_rank0(prepared.note_begun)
            with trainer.checkpointer.completing_saves():
                trainer.train()
            trainer.reporter.summary(trainer.state)
        startup.say(world, startup.next_commands(experiment))
    world.leave()


def build_trainer(prepared: PreparedRun, world: World, stop: StopSignal) -> Trainer:
    """Return the Trainer with all its parts (model, optimizer, data loader and so on), each built once. Collective."""
    load("torch._dynamo")  # imported here, not at the first use of an optimizer or DistributedDataParallel
    import torch

    from checkpointing import Checkpointer
    from harness.data.loader import TokenLoader
    from harness.model.weights import check_memory
    from harness.planning.rates import Rates
    from harness.training.evaluations import Evaluations
    from harness.training.loss_meter import LossMeter
    from harness.training.reporter import Reporter
    from harness.training.step import build_training_step
    from harness.training.zero1 import StatePartition

    config, position = prepared.experiment.config, prepared.position
    check_memory(prepared.experiment.model)
    torch.manual_seed(config.random_seed)  # every rank draws the same weights
    partition = StatePartition.for_world(world)
    step = build_training_step(
        *(prepared.experiment, prepared.step_config, world), partition=partition, before_exchange=world.watchdog.beat
    )
    meter, reporter = LossMeter(world.device, prepared.experiment.model), Reporter(prepared, world)
    return Trainer(
        prepared,
        world,
        stop,
        state=prepared.state(world),
        loader=TokenLoader(prepared.dataset.split("train"), position.start_token, prepared.layout, prepared.batches),
        rates=Rates.of(config, position.total_steps, prepared.layout.global_tokens),
        optimizer_step=step,
        meter=meter,
        evaluations=Evaluations(prepared, world, step, stop),
        reporter=reporter,
        checkpointer=Checkpointer(prepared, world, step, meter, reporter),
    )


if __name__ == "__main__":
    main()
