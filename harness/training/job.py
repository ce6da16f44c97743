"""Everything one training job drives, and what it writes down as it goes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness.common.errors import SPEAKER_PATIENCE_SECONDS, PeerError, RunError, RunStopped, UserError
from harness.common.memory import is_out_of_memory
from harness.data.dataset import Dataset
from harness.data.loader import BatchLayout, TokenLoader
from harness.data.tokenizers.load import load_tokenizer
from harness.distributed.replicas import describe_divergence, weight_checksums
from harness.distributed.sharing import Ranks
from harness.distributed.signals import StopSignal
from harness.distributed.watchdog import Place
from harness.distributed.world import World, leaving_with_peers
from harness.evaluation.generation import Sampling, continue_text
from harness.runs.checkpoint_meta import CheckpointMeta, Provenance, TrainState, upgrade_notebook_meta
from harness.runs.directory import RunDirectory
from harness.runs.experiment import Position, comparable_losses
from harness.runs.metrics import (
    BenchmarkEvent,
    CheckpointEvent,
    Event,
    MetricsFile,
    SampleEvent,
    TrainEvent,
    ValidationEvent,
)
from harness.runs.schedule import Schedule
from harness.runs.summary import Outcome, summarise, write_summary
from harness.runs.throughput import Conditions, Throughput, same_conditions
from harness.runs.train_config import TrainConfig
from harness.training.async_writer import SyncWriter
from harness.training.clock import Clock
from harness.training.evaluations import validation_loss
from harness.training.loss_meter import LossMeter, TrainMetrics, metric_values
from harness.training.reporter import Console
from harness.training.rng import seed_for_rank
from harness.training.startup import measure_machine
from harness.training.state import (
    capture_optimizer,
    capture_ranks,
    load_notebook_optimizer,
    restore_optimizer,
    restore_ranks,
)
from harness.training.step import OptimizerStep

if TYPE_CHECKING:
    from harness.evaluation.benchmarks.run import Score
    from harness.training.evaluations import RunBenchmarks


SAMPLE_TOKENS = 50
# What is done after a step and can be left off for a signal, in its order.
INTERRUPTIBLE = ("validation", "benchmarks")


@dataclass
class Job:
    """The objects of a training job on this rank. Methods that only rank 0 has work in may be called on every rank."""

    world: World
    run: RunDirectory
    config: TrainConfig
    dataset: Dataset
    shape: BatchLayout
    position: Position
    schedule: Schedule
    model: Any  # a GPTModel, bare: what is saved, evaluated and sampled from
    step: OptimizerStep  # holds the model as it is trained: wrapped, if there are several ranks
    speed: Throughput
    clock: Clock
    provenance: Provenance
    write_checkpoint: Callable[[dict[str, Any], set[str]], None]
    writer: SyncWriter
    state: TrainState = field(default_factory=TrainState)
    stop: StopSignal = field(default_factory=StopSignal)
    benchmarks: RunBenchmarks | None = None
    protected: set[str] = field(default_factory=set)  # checkpoints that keep_checkpoints never removes

    def __post_init__(self) -> None:
        self.loader = TokenLoader(self.dataset.split("train"), self.position.start_token, self.shape)
        self.meter = LossMeter(self.world.device)
        self.metrics = MetricsFile(self.run.metrics)
        self.console = Console(self.position.total_steps, self.position.first_step, visible=self.world.is_main)
        self.due: str | None = None  # what a signal interrupted after the last step: "validation" or "benchmarks"
        self._seconds_at_start = dict(self.clock.seconds)
        self._last_report = (self.position.tokens_seen, self.clock.seconds["training"])

    def warm_up(self) -> None:
        """One forward and backward pass whose gradients are thrown away, before the first step or any restored state.

        It compiles what is compiled, and lets DDP arrange its buckets in the order gradients come in, which it does
        after the first exchange: a continued run then adds up gradients in the same order as one that never stopped.
        """
        self.step.accumulate([self.loader.microbatch(0)])
        self.step.forget_gradients()

    def validate(self) -> float | None:
        """Mean loss over train.json's validation slice, or None if a rank was asked to stop; the same on every rank."""
        assert self.config.validation_batches is not None
        assert self.config.start_val_token is not None
        loader = TokenLoader(self.dataset.split("validation"), self.config.start_val_token, self.shape)
        shared, step = self.config.validation_ranks == "all", self.state.global_step
        ranks = Ranks(self.world, shared, self.is_stopping, step)
        return validation_loss(self.model, loader, self.config.validation_batches, self.step.precision, ranks)

    def is_stopping(self) -> bool:
        """Whether a signal has asked this rank to stop, or another one, as far as is known."""
        return bool(self.stop.signal) or self.world.watchdog.is_anyone_stopping()

    def load_benchmarks(self) -> None:
        """Get ready for train.json's benchmarks, if there are any. Collective. UserError if they cannot be had."""
        if self.config.benchmark_tasks is None:
            return
        from harness.training.evaluations import RunBenchmarks

        tokenizer = load_tokenizer(self.dataset.tokenizer)
        self.benchmarks = RunBenchmarks.load(
            self.world, self.config, self.model, tokenizer=tokenizer, precision=self.step.precision
        )

    def benchmark(self) -> list[Score] | None:
        """The scores of train.json's benchmarks, or None if a rank was asked to stop; the same on every rank. If they
        cannot be had, that is a warning, and there are none."""
        from harness.training.evaluations import EvaluationFailed

        assert self.benchmarks is not None, "loaded before the first step"
        step = self.state.global_step
        try:
            return self.benchmarks.scores(Ranks(self.world, True, self.is_stopping, step, "benchmarks"))
        except EvaluationFailed as error:
            if self.world.is_main:
                warnings.warn(f"global step {step}: no benchmarks: {error}", stacklevel=2)
            return []

    def record_benchmarks(self, scores: list[Score]) -> None:
        """A line of metrics for each score."""
        if not self.world.is_main or not scores:
            return
        for score in scores:
            self._append(BenchmarkEvent, **asdict(score))
        said = ", ".join(f"{score.task} {score.metric} {score.value:.4g}" for score in scores)
        self.console.say(f"global step {self.state.global_step}: {said}")
        self.draw_chart()

    def record_report(self, report: TrainMetrics) -> None:
        """A line of metrics, and the newest numbers for whoever watches."""
        if not self.world.is_main:
            return
        tokens, seconds = self.state.tokens_seen, self.clock.now()["training"]
        tokens_per_second = (tokens - self._last_report[0]) / max(seconds - self._last_report[1], 1e-9)
        self._last_report = (tokens, seconds)
        mfu = self.speed.mfu(tokens_per_second / self.world.size)
        rates = {"tokens_per_second": round(tokens_per_second, 1), "mfu": mfu}
        rate = self.step.optimizer.learning_rate
        self._append(TrainEvent, **metric_values(report), learning_rate=rate, **rates)
        shown = {"loss": f"{report.loss:.3f}", "tps": f"{tokens_per_second:,.0f}"}
        if mfu is not None:
            shown["mfu"] = f"{mfu:.1%}"
        self.console.show(self.state.global_step, {**shown, **self._dollars()})

    def _dollars(self) -> dict[str, str]:
        """Spent so far and projected for the whole run, at the pace since this process started."""
        so_far = self.speed.dollars(self.clock.total)
        if so_far is None:
            return {}
        seconds = self.clock.now()
        here = sum(seconds[phase] - self._seconds_at_start[phase] for phase in seconds if phase != "setup")
        done = self.state.global_step + 1 - self.position.first_step
        remaining = self.position.total_steps - self.state.global_step - 1
        return {"$": f"{so_far:,.2f} of {so_far + (self.speed.dollars(here * remaining / done) or 0):,.2f}"}

    def record_validation(self, loss: float) -> None:
        if not self.world.is_main:
            return
        self._append(ValidationEvent, loss=loss)
        self.console.say(f"global step {self.state.global_step}: validation loss {loss:.3f}")
        self.draw_chart()

    def draw_chart(self) -> None:
        """Draw the chart of the run so far. Whatever goes wrong in it is a warning: a picture never ends a run."""
        try:
            from harness.runs.chart import draw_training_chart

            draw_training_chart(self.run.metrics, self.run.chart, title=self.run.path.name)
        except Exception as error:
            warnings.warn(f"{self.run.chart}: no chart: {error}", stacklevel=2)

    def save(self, *, is_best: bool = False, planned: bool = False, due: str | None = None) -> None:
        """Write a checkpoint of the last step done. Collective; unplanned ones leave no trace in the metrics, so that
        those are the ones of a run that never stopped. `due`: the step's "validation" or "benchmarks" are still to be
        done, and what comes after them."""
        state = {"is_best": is_best, "planned": planned, **{f"{place}_due": due == place for place in INTERRUPTIBLE}}
        with self.clock.phase("checkpointing"):
            self.check_weights()
            ranks = capture_ranks(self.meter, self.world)
            self.world.on_rank0(self.writer.wait)  # before there is a second copy of the weights
            optimizer, scaler = capture_optimizer(self.step, self.world)
            parts = {"train_state": ranks, "optimizer": optimizer, "scaler": scaler}
            self.world.on_rank0(lambda: self._save_on_rank0(parts, state))
        if planned and self.world.is_main:
            self._append(CheckpointEvent, is_best=is_best)
            if not self.config.validates:
                self.draw_chart()

    def check_weights(self) -> None:
        """Raises RunError if the ranks' weights are no longer the same. Collective."""
        step, own = self.state.global_step, list[int]()
        if self.world.size > 1:
            with self.world.watchdog.guard(Place(step, "check")):
                own = weight_checksums(self.model)
        prints = self.world.gather(own)
        difference = describe_divergence(prints, self.model)
        if difference:
            raise self.world.collective_error(
                f"{difference} after global step {self.state.global_step}: a device or its memory is faulty; the "
                "checkpoints there are were checked before they were written: leave that device out, and run the "
                "command again to continue"
            )

    def finish_saving(self) -> None:
        """Return when every checkpoint is on the disk. Collective."""
        with self.clock.phase("checkpointing"):
            self.world.on_rank0(self.writer.wait)

    @contextmanager
    def saving_to_the_end(self) -> Iterator[None]:
        """If what is inside fails, give a save that is under way some time before the process ends."""
        try:
            yield
        except Exception:
            with suppress(Exception):  # the first error is the one to tell
                self.writer.wait(SPEAKER_PATIENCE_SECONDS)
            raise

    def _save_on_rank0(self, captured: dict[str, Any], state: dict[str, Any]) -> None:
        tokenizer = self.dataset.tokenizer
        meta = CheckpointMeta(
            **self.state.values(),
            **state,
            seconds=self.clock.now(),
            metrics_bytes=self.metrics.size(),
            world_size=self.world.size,
            microbatch_size=self.shape.microbatch_size,
            accumulation_steps=self.shape.accumulation_steps,
            device=self.world.device_name,
            tokenizer=tokenizer.name if isinstance(tokenizer, Path) else tokenizer,
            torch=torch.__version__,
            **vars(self.provenance),
        )
        parts = {
            **captured,
            "weights": self.model.to_checkpoint_names(),
            "meta": meta,
            "tokenizer": tokenizer if isinstance(tokenizer, Path) else None,
        }
        self.writer.submit(lambda: self.write_checkpoint(parts, self.protected))

    def begin(self) -> None:
        """Everything is as made: only the random state of this rank is still to be set."""
        self.warm_up()
        seed_for_rank(self.config.random_seed, self.world.rank)

    def resume(self, saved: Any, source: Path) -> None:
        """Take over what a checkpoint (checkpoints.Checkpoint) read from `source` holds.

        Raises UserError if it is another model's.
        """
        self.model.load_checkpoint_tensors(saved.weights, source)
        self.warm_up()
        seed, first_step = self.config.random_seed, self.position.first_step
        meta = upgrade_notebook_meta(saved.meta, self.provenance, self.shape.global_tokens)
        try:
            if meta is saved.meta:
                restore_optimizer(self.step, (saved.optimizer, saved.scaler))
                restore_ranks(saved.train_state, self.meter, self.world, seed=seed, step=first_step)
            else:
                load_notebook_optimizer(self.step, self.model.config, (saved.optimizer, saved.scaler))
                seed_for_rank(seed, self.world.rank, first_step)
        except UserError as error:
            raise UserError(f"{source}/{error}; use another checkpoint by its name, or --restart") from None
        self.state = meta.state()
        now = Conditions(self.world.size, self.world.device_name, self.provenance.train)
        if not same_conditions(meta.conditions, now):  # the speed is that of today's batch on today's machine
            self.state.measure_from_here(self._seconds_at_start["training"])
        self.due = meta.due
        if meta is not saved.meta or not comparable_losses(meta, self.provenance):
            self.state.forget_best()

    def _append(self, kind: type[Event], **values: Any) -> None:
        place: dict[str, Any] = {"global_step": self.state.global_step, "tokens_seen": self.state.tokens_seen}
        self.metrics.append(kind(**place, seconds=round(self.clock.total, 3), **values))

    def print_sample(self) -> None:
        """Continue train.json's `sample_prompt` with the model as it is. Rank 0 only."""
        assert self.config.sample_prompt is not None
        tokenizer, sampling = load_tokenizer(self.dataset.tokenizer), Sampling(seed=self.config.random_seed)
        try:
            text = continue_text(self.model, tokenizer, self.config.sample_prompt, SAMPLE_TOKENS, sampling)
        except RunError as error:  # whether the run goes on is for others to decide
            self.console.say(f"global step {self.state.global_step}: no sample: {error}")
            return
        self._append(SampleEvent, text=text)
        self.console.say(f"global step {self.state.global_step}: {text}")

    def finish(self) -> None:
        """Write and print the summary. Collective."""
        self.finish_saving()
        self.console.close()
        machine = measure_machine(self.world)
        if self.world.is_main:
            outcome = Outcome(self.state, self.clock.now(), self.speed, machine, self.shape)
            write_summary(self.run, summarise(self.run.path.name, outcome, self.provenance))
            self.draw_chart()


@contextmanager
def explained_failures(microbatch_size: int, stop: StopSignal) -> Iterator[None]:
    """Turn an out-of-memory on this rank, or another rank's end, into a line that says what to do, or into silence."""
    try:
        with leaving_with_peers():
            yield
    except PeerError:
        if stop.signal:  # torchrun has told us to go already
            raise RunStopped(stop.signal) from None
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else "out of memory"
        raise RunError(
            f"out of memory with microbatch_size {microbatch_size} ({reason}); -f finds the largest that "
            "fits, and gradient_accumulation_steps keeps the global batch"
        ) from None
