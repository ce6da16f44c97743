"""Train a GPT-2-class model as its run directory describes.

`Trainer` is the training loop. Import torch, and modules that need it, inside functions: --help, --plan and errors in
the run's files must not wait for torch.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.common.errors import (
    CEILING,
    DIVERGED,
    EXIT,
    SPEAKER_PATIENCE_SECONDS,
    PeerError,
    RunStopped,
    UserError,
    end_for_good,
    exit_if_ended,
    survive_closed_output,
    tell_how_to_continue,
)
from harness.common.libraries import configure_libraries, load
from harness.common.options import POSITIVE, RUNS_DIR, SPEED, Command, TrainOptions
from harness.common.processes import PARENT, exit_when_launcher_dies
from harness.distributed.signals import StopRequest
from harness.distributed.watchdog import Place

# A run has diverged if its loss has been too high for the fraction PATIENCE of its steps, and for at least
# LEAST_PATIENCE reports.
PATIENCE, LEAST_PATIENCE = 0.05, 20

if TYPE_CHECKING:
    from harness.distributed.world import World
    from harness.planning.experiment import Experiment
    from harness.training.startup import PreparedRun


class Trainer:
    """Training loop and all its parts. Every method is called on every rank."""

    def __init__(self, prepared: PreparedRun, world: World, stop: StopRequest) -> None:
        """Build the parts of training. The model has new weights, which are equal on all ranks.

        Raises UserError if host memory is too small for the weights, if this machine cannot compute what train.json
        demands, or if a benchmark or the tokenizer cannot be used.
        """
        load("torch._dynamo")  # else the first use of an optimizer or of DDP would import it, more slowly
        import torch

        from checkpointing import Checkpointer
        from harness.data.loader import TokenLoader
        from harness.model.weights import check_memory
        from harness.planning.rates import build_schedule
        from harness.training.compile_cache import CompileCache
        from harness.training.evaluations import Evaluations
        from harness.training.loss_meter import LossMeter
        from harness.training.reporter import Reporter
        from harness.training.step import build_training_step

        self.prepared, self.world, self.stop = prepared, world, stop
        experiment, position, layout = prepared.experiment, prepared.position, prepared.layout
        check_memory(experiment.model)
        torch.manual_seed(experiment.config.seed_of("init"))  # every rank draws the same weights
        self.optimizer_step = build_training_step(experiment, prepared.step_config, world)
        self.compile_cache = CompileCache.of(experiment, prepared.step_config, world)
        self.compile_cache.load()  # before the warm-up compiles the model
        self.meter = LossMeter(world.device, experiment.model)
        self.reporter = Reporter(prepared, world)
        self.state = prepared.state(world)
        order = experiment.window_order(prepared.data.lengths("train"))
        tokens, first_window = prepared.data.tokens("train"), position.tokens_seen // layout.context_length
        self.loader = TokenLoader(tokens, order, layout, prepared.batches, first_window=first_window)
        self.schedule = build_schedule(experiment.config, position.total_steps, layout.global_tokens)
        self.evaluations = Evaluations(prepared, world, self.optimizer_step, stop)
        self.checkpointer = Checkpointer(prepared, world, self.optimizer_step, self.meter, self.reporter)

    def train(self) -> None:
        """Run the remaining steps and all work that is due. Call `checkpointer.restore` first.

        Raises RunStopped on every rank if a signal, a ceiling (max_hours, max_dollars) or a divergence stops the run
        early. The last completed step is then saved, and all uploads have ended or been given up.
        """
        self.stop.listen()
        survive_closed_output(self.stop.hang_up)
        self.reporter.console.start()
        self.compile_cache.save()
        state, position = self.state, self.prepared.position
        try:
            if self.prepared.unfinished_work:
                self.after_step(state.global_step, self.prepared.unfinished_work)
            steps = range(position.first_step, position.total_steps)
            # Raises RunStopped before the next step if there is a reason to stop, and the error of a background save.
            for step in self.stop.steps_until_stop(self.world, steps, between=self.checkpointer.writer.check):
                with self.prepared.clock.phase("training"), self.world.watchdog.guard(Place(step, "step")):
                    steps_from_start = step - position.first_step  # the loader starts where this process does
                    microbatches = self.loader.microbatches(steps_from_start, self.world.rank)
                    batch_tokens = self.prepared.batches.at(steps_from_start).global_tokens
                    rate_factor, decay_factor = self.schedule.at(step, batch_tokens)
                    result = self.optimizer_step.run(microbatches, rate_factor, decay_factor)
                    self.meter.add(result)  # a GPU may still be computing it
                state.global_step = step
                state.tokens_seen += batch_tokens
                self.reporter.console.advance()
                self.after_step(step)
            self.checkpointer.finish()
        except RunStopped as request:
            # metrics.jsonl gets no line for this checkpoint, so that the file equals that of a run that never stopped.
            # If a ceiling is reached before a resumed process has done a step, the checkpoint is saved again, with this
            # process's seconds, so that the same command is refused next time.
            has_done_nothing = request.reason == CEILING and 0 <= state.global_step == position.first_step - 1
            is_saved = state.global_step == self.checkpointer.saved_step and not has_done_nothing
            if request.interrupted_evaluation or not is_saved:
                self.checkpointer.save(state, planned=False, interrupted_evaluation=request.interrupted_evaluation)
            self.checkpointer.finish()
            self.reporter.stopped(request.reason, state)
            end_for_good(request.exit_status)
            # All ranks wait for the upload, because torchrun ends all of them once the first one has exited. If another
            # machine's torchrun was itself asked to stop, it kills its ranks half a minute later. Everything is saved
            # by then, so the watchdogs on rank 0's machine must not report those ranks as gone and end the upload.
            EXIT.has_own_reason = self.world.rank == self.world.local_rank
            with suppress(PeerError):
                self.world.on_rank0(self.prepared.uploads.finish)
            raise

    def after_step(self, step: int, due: set[str] | None = None) -> None:
        """Do the work that is due after global step `step`.

        `due`, if given, limits the work to the part that an earlier process has left undone. Raises RunStopped on every
        rank to end the run early. Raises RunError, perhaps on rank 0 alone, if a file cannot be written or the ranks'
        weights differ.
        """
        state, config, position = self.state, self.prepared.experiment.config, self.prepared.position
        due = due or position.due_after(step, config)
        is_skipping = False
        if "report" in due:
            is_skipping = self.report(step)
            # A divergence at the last step is recorded now, at an earlier step only after the evaluations below. If one
            # of them is interrupted there, the next process must continue, not stop as diverged.
            state.has_diverged |= is_skipping and step == position.last_step
        elif due:  # a GPU may be steps behind, and the wait for it counts as training, not as the work below
            with self.prepared.clock.phase("training"), self.world.watchdog.guard(Place(step, "report")):
                self.meter.synchronize()
        if "validation" in due:
            with self.prepared.clock.phase("validation"):
                state.val_loss, by_source = self.evaluations.validation_loss(step)
            self.reporter.validation(state.val_loss, by_source, state)
        if "benchmarks" in due:
            with self.prepared.clock.phase("benchmarks"):
                scores = self.evaluations.benchmark_scores(step)
            self.reporter.benchmarks(scores, state)
        if "sample" in due:
            with self.prepared.clock.phase("validation"):
                text = self.evaluations.sample()
            self.reporter.sample(text, state)
        state.has_diverged |= is_skipping
        if "checkpoint" in due:  # last, because it records the results of the work above
            self.checkpointer.save(state, planned=True)
            meta = self.prepared.meta  # after a lowered budget, its step may be the last one, and has its line already
            if meta is None or not (meta.planned and meta.global_step == step):
                self.reporter.checkpoint(state)
            if step != position.last_step:
                self.stop.raise_if_set(self.world)  # a save is slow, and torchrun kills ranks 30 s after a signal
        elif "weights_check" in due:
            self.checkpointer.check_weights(state)
        if due:  # an evaluation may have compiled more
            self.compile_cache.save()
        is_reported = "report" in position.due_after(step, config)  # perhaps by an earlier process
        has_diverged = is_skipping or (is_reported and config.stop_if_diverged and state.has_diverged)
        if has_diverged and step != position.last_step:
            raise RunStopped(DIVERGED)

    def report(self, step: int) -> bool:
        """Report the losses since the last report. Return True if the gradients of `max_skipped_steps` steps in a row
        were not finite, which is a divergence."""
        config = self.prepared.experiment.config
        with self.prepared.clock.phase("training"):
            with self.world.watchdog.guard(Place(step, "report")):
                self.meter.synchronize()
            metrics = self.meter.reduce(self.world, self.world.watchdog.own_seconds())
            if not metrics.microbatches:  # an earlier process has reported this step
                return False
            self.state.add_report(metrics.loss, metrics.microbatches, metrics.skipped_steps)
            interval = min(filter(None, (config.report_interval, config.validation_interval, config.checkpoint_every)))
            patience = max(LEAST_PATIENCE, math.ceil(PATIENCE * self.prepared.position.total_steps / interval))
            self.state.follow_level(patience=patience, interval=interval)
            self.reporter.training(metrics, self.state, self.optimizer_step.learning_rate)
            return metrics.skipped_in_a_row >= config.max_skipped_steps


def print_schema(context: click.Context, _: click.Parameter, kind: str | None) -> None:
    """Click callback: print the JSON Schema of train.json or model.json and exit, or do nothing if `kind` is None."""
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
@click.option("--processes", type=click.IntRange(1, 1024), help="Start N processes, one per GPU, or all on the CPU.")
@click.option(
    "-f", "--find-max-microbatch-size", "find", is_flag=True, help="Find the largest microbatch that fits; no training."
)
@click.option("--memory-limit-gib", type=POSITIVE, help="With -f: assume this many GiB of memory for each process.")
@click.option("--write", is_flag=True, help="With -f: write the size, or the next smaller valid one, to train.json.")
@click.option("--plan", is_flag=True, help="Print what the command would do and cost; no training, no download.")
@click.option("--assume-tps", type=SPEED, help="With --plan: assume N tokens/s, not counting validation time.")
@click.option("--assume-tps-with-validation", type=SPEED, help="With --plan: assume N tokens/s, validation included.")
@click.option("--assume-world-size", type=click.IntRange(min=1), help="With --plan: assume N ranks.")
@click.option("--assume-device", help="With --plan: estimate the speed on this kind of GPU, such as H100.")
@click.option("--mirror", metavar="URL", help="Use this mirror (docs/mirror.md), not train.json's; 'none': no mirror.")
@click.option("--wait", is_flag=True, help="Wait if another machine trains the run with the same mirror.")
@click.option("--take-over", is_flag=True, help="Take the run over from a machine that trains it with the same mirror.")
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

    The same command starts a run, continues an unfinished one from its latest checkpoint, and does not train a finished
    one. CHECKPOINT is a folder name in runs/RUN/checkpoints, `latest` or `best`: training continues from it, and what
    later steps have written is moved to runs/RUN/aside.

    \b
    On all GPUs of a machine (for several machines: docs/CLUSTER.md):
        uv run ddp_train.py 8xa100m40 datasets --processes 8
        uv run torchrun --nproc_per_node=8 ddp_train.py 8xa100m40 datasets
    """
    exit_when_launcher_dies()
    exit_if_ended()
    if len(checkpoints) > 1 or (datasets_dir / "train.json").is_file() or "*" in run:  # the shell may have expanded *
        words = " ".join([run, str(datasets_dir), *checkpoints])
        raise UserError(f"{words}: give one RUN, then DATASETS_DIR [CHECKPOINT]; for several runs, use sweep_runs.py")
    began = time.perf_counter()
    checkpoint = checkpoints[0] if checkpoints else None
    options = TrainOptions(**given)
    options.check(checkpoint)
    tell_how_to_continue("--restart" if options.restart else "the CHECKPOINT" if checkpoint else None)
    from harness.distributed.environment import ranks_to_start, read_ranking, run_ranks, unblock_stopping_signals
    from harness.planning.experiment import Experiment
    from harness.runs.directory import RunDirectory
    from harness.runs.ending import check_on_end, watch_end

    unblock_stopping_signals()
    here = read_ranking()  # before all else, since stale RANK variables would change the job
    to_start = ranks_to_start(options.processes)
    found = RunDirectory.find(options.runs_dir, run)
    experiment = Experiment.load(found, datasets_dir)
    if options.restart:
        experiment.check_restart()
    experiment.check_dataset(ask_hub=not options.plan and here.local_rank == 0)  # one process per machine
    # If torchrun starts this process again, the first start has applied CHECKPOINT and --restart.
    is_alone = here.world_size == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if here.rank == 0 and not options.find:
        from harness.mirror.start import look
        from harness.planning.plan import checked_plan, print_plan

        mirrored = look(experiment, options, checkpoint) if options.plan or is_alone else None
        if options.plan:
            print_plan(experiment, checkpoint, options.processes or here.world_size, options, mirrored)
        elif is_alone:  # find errors before torch is imported and other ranks are started
            checked_plan(experiment, checkpoint, options.processes or 1, restart=options.restart, mirrored=mirrored)
        if not options.plan:
            check_on_end(found, experiment.config)
    if options.plan:
        return

    def watch(rank0: int) -> None:
        if not options.find:
            from harness.mirror.start import mirror_url

            watch_end(found, experiment.config, rank0, mirror_url(experiment, options))

    if to_start:
        run_ranks(to_start, watch)
    if here.rank == 0 and PARENT not in os.environ:
        watch(os.getpid())
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
        train(experiment, checkpoint, options, began=began)


def train(experiment: Experiment, checkpoint: str | None, options: TrainOptions, *, began: float) -> None:
    """Start or resume training on this rank. Collective.

    `checkpoint` is the command's CHECKPOINT, or None. The run's clock counts from `began`, a value of
    `time.perf_counter()`. A finished run is not trained, but its files and its mirror are completed. Raises RunStopped
    if training stops early.
    """
    from checkpointing import rewind
    from harness.distributed.world import World, say
    from harness.training.clock import Clock
    from harness.training.failures import explained_failures
    from harness.training.reporter import restore_summary
    from harness.training.startup import prepare

    clock = Clock(experiment.config.price_per_hour, began)
    stop, run = StopRequest(), experiment.run
    # Until Trainer.train calls `stop.listen`, a signal ends this process at once; there is nothing to save yet.
    world = World.join(is_stopping=lambda: bool(stop.reason))
    prepared = prepare(experiment, world, clock, checkpoint, options)
    if prepared.is_finished:
        steps = prepared.position.first_step
        say(world, f"{run.path.name} is finished: {steps:,} global steps; --restart trains it again")
        if prepared.checkpoint and prepared.meta and not prepared.is_from_notebook:
            world.on_rank0(partial(rewind, run, prepared.checkpoint, prepared.meta))
        world.on_rank0(partial(restore_summary, prepared, world))
        prepared.uploads.start()
    else:
        stop.ceiling_at = time.monotonic() + min(clock.ceilings(experiment.config).values(), default=math.inf)
        with explained_failures(experiment.config.microbatch_size, stop):
            trainer = Trainer(prepared, world, stop)
            trainer.checkpointer.restore(trainer.loader)
            world.on_rank0(prepared.lock.note_begun)  # so that a restart by torchrun resumes the run
            prepared.uploads.start()
            try:
                trainer.train()
            except RunStopped:  # every save and upload has ended
                raise
            except Exception:
                with suppress(Exception):  # an error of a background save must not replace this one
                    trainer.checkpointer.writer.wait(SPEAKER_PATIENCE_SECONDS)
                prepared.uploads.name_missing()
                raise
            trainer.reporter.summary(trainer.state)
    world.on_rank0(prepared.uploads.finish)
    world.leave()


if __name__ == "__main__":
    main()
