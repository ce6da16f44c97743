"""Train a GPT-2-class model: a run directory in, a trained and measured model out.

The loop is `Trainer`; what happens after a step is its `after_step`. One process per device, by --processes or under
torchrun, or plain `python` on one. What needs torch is imported in functions: --help, --plan and errors in the run's
files do without.
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
        """Run the steps that are left. Raises RunStopped, after a checkpoint, if a signal asked any rank to end."""
        self.stop.listen()
        survive_closed_output(self.stop.hang_up)
        self.reporter.console.start()
        steps = range(self.prepared.position.first_step, self.prepared.position.total_steps)
        try:
            if self.prepared.interrupted_in:  # a signal came in the middle of what follows the last step
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
        """One update of the weights: forward and backward over this rank's microbatches, gradients exchanged with the
        last of them, clipped and applied (`OptimizerStep.run`). The device may still be at it afterwards."""
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
        """Do what is due after a step, from `first` on; all of it before the checkpoint, which includes the results."""
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
                self.stop.raise_if_set(self.world)  # a save takes long, and torchrun kills after 30 seconds
        elif "weights_check" in due:
            self.checkpointer.check_weights(self.state)

    def report(self, step: int) -> None:
        """Wait for the device, and report the losses since the last report. Raises RunError if too many gradients in a
        row were not finite."""
        with self.prepared.clock.phase("training"):
            with self.world.watchdog.guard(Place(step, "report")):
                self.meter.synchronize()
            metrics = self.meter.reduce(self.world)
            self.state.add_report(metrics.loss, metrics.microbatches, metrics.skipped_steps)
            self.reporter.training(metrics, self.state, self.optimizer_step.optimizer.learning_rate)
        metrics.check_skipped_steps(step, self.prepared.experiment.config.max_skipped_steps, self.world)


def print_schema(context: click.Context, _: click.Parameter, kind: str | None) -> None:
    """click's callback: print the JSON Schema of train.json or model.json, if it is asked for, and end."""
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
@click.option("--assume-tps-with-validation", type=POSITIVE, help="The same, validation's time counted.")
@click.option("--assume-world-size", type=click.IntRange(min=1), help="With --plan: as if there were N ranks.")
@click.option("--assume-device", help="With --plan: as if on such GPUs, like H100: an estimated speed.")
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
    finished one. CHECKPOINT is a folder name in runs/RUN/checkpoints, `latest` or `best`: training continues there, and
    what came after it is moved aside.

    \b
    On all GPUs of a machine, or of several with torchrun on each:
        uv run ddp_train.py 8xa100m40 datasets --processes 8
        uv run torchrun --nproc_per_node=8 ddp_train.py 8xa100m40 datasets
    """
    exit_when_launcher_dies()
    with one_line_errors():
        if len(checkpoints) > 1 or (datasets_dir / "train.json").is_file():
            raise UserError(f"{run}, {datasets_dir}, …: one run at a time; sweep_runs.py trains several")
        checkpoint = checkpoints[0] if checkpoints else None
        options = TrainOptions(**given)
        options.check(checkpoint)
        from harness.distributed.environment import ranks_to_start, read_ranking, run_ranks, take_signals
        from harness.planning.experiment import Experiment
        from harness.runs.directory import RunDirectory

        take_signals()
        here = read_ranking()  # first: a launcher's leftovers would make this another run than was meant
        to_start = ranks_to_start(options.processes)
        found = RunDirectory.find(options.runs_dir, run)
        experiment = Experiment.load(found, datasets_dir)
        experiment.check_dataset(ask_hub=not options.plan and here.local_rank == 0)  # one process a machine asks
        if options.plan:
            from harness.planning.plan import print_plan

            if here.rank == 0:
                print_plan(experiment, checkpoint, options.processes or here.world_size, options)
            return
        if to_start:
            run_ranks(to_start)
        configure_libraries()
        if here.rank == 0:  # the next line takes seconds, in which torch is loaded and the ranks meet
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
    """Start, continue, or find that there is nothing left to do."""
    from checkpointing import finish_already_trained
    from harness.distributed.world import World
    from harness.training import startup

    clock, stop = startup.Clock(), StopSignal()
    world = World.join(is_stopping=stop.is_set)  # it listens from Trainer.train on
    prepared = startup.prepare(experiment, world, clock, checkpoint, options)
    if prepared.is_finished:
        finish_already_trained(prepared, world, named=checkpoint is not None)
    else:
        with startup.explained_failures(experiment.config.microbatch_size, stop):
            trainer = build_trainer(prepared, world, stop)
            trainer.checkpointer.restore(trainer.loader)
            world.on_rank0(prepared.note_begun)
            with trainer.checkpointer.saving_to_the_end():
                trainer.train()
            trainer.reporter.summary(trainer.state)
        startup.say(world, startup.next_commands(experiment))
    world.leave()


def build_trainer(prepared: PreparedRun, world: World, stop: StopSignal) -> Trainer:
    """Model, optimizer, data and all that the loop drives, made once and in order. Collective."""
    load("torch._dynamo")  # optimizers and the wrap for several ranks would at their first use
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
