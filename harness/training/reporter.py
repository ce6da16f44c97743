"""Output of a run during training: a progress bar or plain lines, metrics.jsonl, the chart, and the summary at the end.

On ranks other than 0, the methods of Reporter print and write nothing.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from harness.common.errors import CEILING, DIVERGED, EXIT, UserError, described, say_last
from harness.common.memory import peak_bytes
from harness.common.messages import GIB, WIDTH, escape_controls
from harness.common.program import program_commit, program_versions
from harness.distributed.world import World, say
from harness.evaluation.benchmarks.run import Score
from harness.model.kernels import attention_in_use
from harness.model.precision import Precision
from harness.planning.experiment import changed_settings, changes_of_result
from harness.runs.checkpoint_meta import CheckpointMeta, TrainState, epochs_of
from harness.runs.checkpoints import Checkpoint
from harness.runs.metrics import (
    BenchmarkEvent,
    CheckpointEvent,
    Event,
    MetricsFile,
    SampleEvent,
    TrainEvent,
    ValidationEvent,
    time_and_cost,
)
from harness.runs.summary import read_summary, summarize, write_summary
from harness.runs.throughput import cost, mfu
from harness.runs.train_config import BUDGETS
from harness.training.chart_process import ChartProcess
from harness.training.loss_meter import TrainMetrics
from harness.training.pace import SlowRanks
from harness.training.startup import PreparedRun

# Seconds to wait for a chart that is still being drawn, when training ends and when it stops early. The second is short
# because torchrun kills its processes 30 seconds after a signal.
LAST_CHART_SECONDS = 60.0
STOPPED_CHART_SECONDS = 5.0
# The order in which numbers are left out on a narrow terminal.
LEAST_IMPORTANT = ("experts", "mfu", "norm", "lr", "tps", "$", "left")
NOT_RECORDED = ("microbatches", "skipped_in_a_row", "own_seconds")  # fields of TrainMetrics that no TrainEvent has


class Console:
    """Progress over global steps, and the newest numbers: a bar on a terminal, plain lines elsewhere. `done` of `total`
    global steps are done at the start. Prints nothing unless `visible`."""

    def __init__(self, total: int, done: int, *, visible: bool) -> None:
        self.total = total
        self.visible = visible
        self._done = done
        self._bar: Any = None

    def start(self) -> None:
        """Show the bar from now on, if standard error is a terminal that reports its size. Must be called after the
        messages of the start-up, which would break the bar."""
        # On a terminal that does not report its size, tqdm would show nothing.
        if self.visible and sys.stderr.isatty() and all(os.get_terminal_size(sys.stderr.fileno())):
            # The numbers include the time left. tqdm's other fields would push the numbers off an 80-column screen.
            layout = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
            self._bar = tqdm(total=self.total, initial=self._done, dynamic_ncols=True, bar_format=layout)

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def show(self, step: int, values: dict[str, str]) -> None:
        """Show the newest numbers, e.g. {"loss": "3.720", "tps": "234,480"}. On a narrow terminal, the bar leaves some
        out."""
        numbers = " ".join(f"{name} {value}" for name, value in values.items())
        if self._bar is not None:
            # If the numbers are too long, tqdm cuts within a number.
            room = (self._bar.format_dict["ncols"] or WIDTH) - len(f"100%|#| {self.total}/{self.total}, ")
            shown, dispensable = dict(values), [name for name in LEAST_IMPORTANT if name in values]
            while len(numbers) > room and dispensable:
                del shown[dispensable.pop(0)]
                numbers = " ".join(f"{name} {value}" for name, value in shown.items())
            self._bar.set_postfix_str(numbers)
        elif self.visible:
            print(f"global step {step}/{self.total - 1}  {numbers}", flush=True)

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text)
        elif self.visible:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Reporter:
    """Prints and records the results of the training loop, and makes the meta.json of a checkpoint. Methods that write
    a line to metrics.jsonl raise RunError if the file cannot be written."""

    def __init__(self, prepared: PreparedRun, world: World) -> None:
        self.prepared = prepared
        self.world = world
        self.run = prepared.experiment.run
        self.clock = prepared.clock
        self.metrics = MetricsFile(self.run.metrics)
        self.chart = ChartProcess(self.run)
        self.slow_ranks = SlowRanks()
        self.console = Console(prepared.position.total_steps, prepared.position.first_step, visible=world.is_main)
        self.skipped_in_a_row = 0  # consecutive skipped steps, as of the last report
        self._last_token = prepared.position.tokens_seen + prepared.tokens()
        self._reports = 0
        self._second_report: tuple[int, dict[str, float]] = (0, {})  # tokens seen and seconds by phase
        # Tokens seen and seconds of training at the last report.
        self._last_report = (prepared.position.tokens_seen, self.clock.seconds["training"])

    def starting(self, saved: Checkpoint | None = None) -> None:
        """Print the number of steps to do, and the tokens of a step. For a new run, also print the model's size,
        devices and precision. With `saved`, the checkpoint to continue from, also print what has changed since."""
        prepared, start, config = self.prepared, self.prepared.checkpoint, self.prepared.experiment.config
        sizes = [f"{stage.layout.global_tokens:,}" for stage in prepared.batches.stages]
        left = f"{len(prepared.steps):,} global steps of {' to '.join(dict.fromkeys([sizes[0], sizes[-1]]))} tokens"
        now, best = prepared.step_config.precision, Precision.for_training(config.precision, self.world.device).name
        if start is None or saved is None:
            size = f"{prepared.provenance.parameters:,} parameters, {self.world.size} x {self.world.device.type}"
            lines = [f"{self.run.path.name}: {size}, {now}, {left}"]
        else:
            lines = [f"{self.run.path.name}: continuing from {start.name}, {left} to go"]
        attention = attention_in_use(config.attention, self.world.device)
        if attention or (saved and saved.meta.attention):
            lines += [f"  attention: {attention or 'as torch chooses'}"]
        if self.world.size > self.world.local_size:
            place = f"{socket.gethostname()}:{self.run.path.resolve()}"
            lines += [f"  results and checkpoints are written by rank 0 alone, to {place}; to continue later,"]
            lines += ["  start rank 0 where that folder is"]
        if saved is None:
            lines += [] if config.initial_weights is None else [f"  starting from {config.initial_weights}"]
        else:
            if prepared.is_from_notebook:
                taken = "weights and optimizer" if saved.optimizer else "weights"
                tokens = prepared.position.tokens_seen
                lines += [f"  the checkpoint is by another program: its {taken} are used, and {tokens:,} tokens"]
                lines += ["  are counted as seen, as many as this run has in the same number of global steps"]
            if saved.meta.precision not in (None, now):
                lines += [f"  precision: {saved.meta.precision} -> {now}"]
            if now != best:
                lines += [
                    f'  in {now}, the precision with which the run began; "precision": "{best}" may be faster here'
                ]
            changes = changed_settings(saved.meta.train, prepared.provenance.train)
            lines += [f"  train.json has changed since: {change}" for change in changes]
        say(self.world, "\n".join(lines))

    def training(self, metrics: TrainMetrics, state: TrainState, learning_rate: float) -> None:
        """Write a line with the training metrics to metrics.jsonl, and show the newest numbers on the console.
        `learning_rate` is that of the last step."""
        if not self.world.is_main:
            return
        self.skipped_in_a_row = metrics.skipped_in_a_row
        tokens, clock = state.tokens_seen, self.clock.now()
        tokens_per_second = (tokens - self._last_report[0]) / max(clock["training"] - self._last_report[1], 1e-9)
        self._last_report = (tokens, clock["training"])
        flops_per_token = self.prepared.experiment.model.flops_per_token
        used = mfu(tokens_per_second / self.world.size, flops_per_token, self.world.device_name)
        given = {key: value for key, value in vars(metrics).items() if key not in NOT_RECORDED and value is not None}
        origin = self.prepared.provenance
        if epochs := epochs_of(origin.model, origin.train, origin.dataset, tokens):
            given["epochs"] = epochs
        rates = {"tokens_per_second": round(tokens_per_second, 1), "mfu": used}
        self.record(TrainEvent, state, **given, learning_rate=learning_rate, **rates)
        shown = {"loss": f"{metrics.loss:.3f}", "tps": f"{tokens_per_second:,.0f}", "lr": f"{learning_rate:.2g}"}
        self._reports += 1
        if self._reports <= 2:
            # The first validation and checkpoint of a new run come between these two reports. They compile code once,
            # so their time must not count for the rest of the run.
            seconds_per_token = 1 / max(tokens_per_second, 1e-9)
            self._second_report = (tokens, clock)
        else:
            tokens_then, then = self._second_report
            seconds_since = sum(clock[phase] - then[phase] for phase in clock if phase != "setup")
            seconds_per_token = seconds_since / max(1, tokens - tokens_then)
        seconds_left = seconds_per_token * (self._last_token - tokens)
        shown["left"] = tqdm.format_interval(seconds_left)
        if self.clock.price_per_hour is not None:
            so_far = sum(self.clock.spent()["dollars"].values())
            shown["$"] = f"{so_far:,.2f} of {so_far + cost(seconds_left, self.clock.price_per_hour):,.2f}"
        shown["norm"] = f"{metrics.gradient_norm:.2f}"
        if used is not None:
            shown["mfu"] = f"{used:.1%}"
        if metrics.expert_load is not None:
            shown["experts"] = f"{metrics.expert_load_min:.2f}-{metrics.expert_load_max:.2f}"
        self.console.show(state.global_step, shown)
        name_of = self.world.watchdog.heartbeats.name_of
        for note in self.slow_ranks.name(metrics.own_seconds, state.global_step, name_of):
            self.console.say(note)

    def validation(self, loss: float, by_source: Mapping[str, float], state: TrainState) -> None:
        """Write and print the validation loss, and draw the chart. `by_source` has the losses on the datasets of a
        mixture, by name."""
        self.record(ValidationEvent, state, loss=loss, **({"by_source": dict(by_source)} if by_source else {}))
        parts = ", ".join(f"{name} {each:.3f}" for name, each in by_source.items())
        self._announce(f"validation loss {loss:.3f}{f' ({parts})' if parts else ''}", state)

    def benchmarks(self, scores: Sequence[Score], state: TrainState) -> None:
        """Write and print the scores, and draw the chart. Without scores, do nothing."""
        for score in scores:
            self.record(BenchmarkEvent, state, **asdict(score))
        if scores:
            said = ", ".join(f"{score.task} {score.metric} {score.value:.4g}" for score in scores)
            self._announce(said, state)

    def sample(self, sample: str | Exception, state: TrainState) -> None:
        """Print a sample, or the error that prevented it. A sample is also written to metrics.jsonl."""
        if isinstance(sample, str):
            self.record(SampleEvent, state, text=sample)
        text = escape_controls(sample) if isinstance(sample, str) else f"no sample: {sample}"
        self._announce(text, state, draws=False)

    def checkpoint(self, state: TrainState) -> None:
        """Write a line for a planned checkpoint to metrics.jsonl. In a run without validation, also draw the chart."""
        self.record(CheckpointEvent, state, is_best=state.is_best)
        if self.world.is_main and not self.prepared.experiment.config.validates:
            self.chart.draw()

    def _announce(self, text: str, state: TrainState, *, draws: bool = True) -> None:
        """Print the result of an evaluation and, with `draws`, draw the chart anew."""
        self.console.say(f"global step {state.global_step}: {text}")
        if self.world.is_main and draws:
            self.chart.draw()

    def stopped(self, reason: int, state: TrainState) -> None:
        """Print why the run stops here and how to resume it. `reason` is that of RunStopped. Also flush metrics.jsonl
        to disk, and finish the chart. Raises RunError if flushing fails."""
        self.console.close()
        if not self.world.is_main:
            return
        step = state.global_step
        done = f"after global step {step}" if step >= 0 else "before the first step"
        self.metrics.make_durable()
        self.chart.finish(STOPPED_CHART_SECONDS)
        if reason == CEILING:
            config = self.prepared.experiment.config
            left = self.clock.ceilings(config)
            key = min(left, key=lambda each: left[each])
            cause, remedy = f"{key} {getattr(config, key):g} of train.json", f"raise {key} and {EXIT.again}"
        elif reason == DIVERGED and self.skipped_in_a_row >= self.prepared.experiment.config.max_skipped_steps:
            cause = f"max_skipped_steps (gradients were not finite in {self.skipped_in_a_row} steps in a row)"
            remedy = f"give a CHECKPOINT well before step {step}, and lower learning_rate or set clipping_max_norm"
        elif reason == DIVERGED:
            since = state.above_level_since
            cause = f"stop_if_diverged (the training loss has been far above its lowest value since about step {since})"
            remedy = (
                f"give a CHECKPOINT well before step {since} and lower learning_rate, or set stop_if_diverged to false"
            )
        else:
            cause, remedy = described(reason), EXIT.again
        say_last(f"stopped by {cause} {done}; to continue, {remedy}")

    def summary(self, state: TrainState) -> None:
        """Write and print the summary, finish the chart, and print which commands test the model. Collective. Raises
        RunError if the summary cannot be written or metrics.jsonl cannot be flushed."""
        self.console.close()
        if self.world.is_main:
            self.chart.draw()
        peak = max(self.world.gather(peak_bytes(self.world.device))) / GIB
        if not self.world.is_main:
            return
        meta, model = self.meta(state), self.prepared.experiment.model
        summary = summarize(self.run.path.name, meta, model, peak_memory_gib=peak)
        self.metrics.make_durable()
        write_summary(self.run, summary)
        self.chart.finish(LAST_CHART_SECONDS)
        run, data = self.run.path, shlex.quote(str(self.prepared.experiment.datasets_dir))
        where = "" if run.parent == Path("runs") else f" --runs-dir {shlex.quote(str(run.parent))}"
        print(f"\nNext:\n  uv run test_smoke.py {run.name}{where}\n  uv run test_loss.py {data} {run.name}{where}")

    def meta(
        self, state: TrainState, *, planned: bool = False, interrupted_evaluation: str | None = None
    ) -> CheckpointMeta:
        """Return the meta.json of a checkpoint that is saved now. `planned` and `interrupted_evaluation` are those of
        `Checkpointer.save`."""
        prepared, experiment = self.prepared, self.prepared.experiment
        resolved: dict[str, Any] = {"budget": prepared.budget, "scaled": prepared.scaled.values}
        resolved["changed"] = prepared.changed
        resolved["attention"] = attention_in_use(experiment.config.attention, self.world.device)
        if experiment.model.moe:
            resolved["active_parameters"] = experiment.model.active_parameters
            resolved["moe_router_loss_scale"] = experiment.moe_router_loss_scale
        tokenizer = prepared.data.tokenizer
        return CheckpointMeta(
            **state.values(),
            is_best=state.is_best,
            last_step=prepared.position.last_step,
            planned=planned,
            validation_due=interrupted_evaluation == "validation",
            benchmarks_due=interrupted_evaluation == "benchmarks",
            **self.clock.spent(),
            metrics_bytes=self.metrics.size(),
            **machine_and_batch(prepared, self.world),
            tokenizer=tokenizer.name if isinstance(tokenizer, Path) else tokenizer,
            precision=prepared.step_config.precision,
            versions=program_versions(),
            commit=program_commit(),
            **{key: value for key, value in resolved.items() if value not in (None, {}, [])},
            **vars(prepared.provenance),
        )

    def record(self, kind: type[Event], state: TrainState, **values: Any) -> None:
        """Write an event of the class `kind` to metrics.jsonl. `values` are the fields that the class adds to Event.
        Does nothing on ranks other than 0."""
        if not self.world.is_main:
            return
        place: dict[str, Any] = {"global_step": state.global_step, "tokens_seen": state.tokens_seen}
        self.metrics.append(kind(**place, **time_and_cost(**self.clock.spent()), **values))


def machine_and_batch(prepared: PreparedRun, world: World) -> dict[str, Any]:
    """Return meta.json's entries about the machine, torch's version and the batch."""
    return {
        "world_size": world.size,
        "microbatch_size": prepared.layout.microbatch_size,
        "accumulation_steps": prepared.layout.accumulation_steps,
        "device": world.device_name,
        "torch": str(torch.__version__),
    }


def restore_summary(prepared: PreparedRun, world: World) -> None:
    """Write and print a finished run's summary from its last checkpoint, if summary.json is missing or has fewer tokens
    than the checkpoint. Does nothing for a checkpoint of the lab notebook's program (upstream.py). Rank 0 only.
    Raises RunError if summary.json cannot be written."""
    meta, run = prepared.meta, prepared.experiment.run
    if meta is None or not meta.seconds:  # no `seconds`: a notebook's checkpoint
        return
    if run.summary.exists():
        try:
            seen = read_summary(run.summary).tokens_seen
        except UserError:  # compare_runs.py names the damaged file and the remedy
            return
        # A summary with fewer tokens is from before the user raised the budget.
        if seen is None or seen >= meta.tokens_seen:
            return
    # Use this process's values only for keys that a checkpoint of an earlier version lacks.
    missing = {key: value for key, value in machine_and_batch(prepared, world).items() if not getattr(meta, key)}
    if meta.last_step not in (None, meta.global_step):  # the budget has been lowered to this step
        train = meta.train | {key: prepared.provenance.train[key] for key in (*BUDGETS, "epochs")}
        missing |= {"train": train, "budget": prepared.budget}
        if changed := [*meta.changed, *changes_of_result(meta, train, {}, prepared.position.last_step)]:
            missing["changed"] = changed
    # Without the peak memory, which was lost with the process that trained
    write_summary(run, summarize(run.path.name, meta.model_copy(update=missing), prepared.experiment.model))
