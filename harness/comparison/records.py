"""Records of runs for a comparison, read from the runs' folders: configuration, progress, results, and figures that
others reported. Does not load torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from harness.common.errors import UserError, explained
from harness.common.lock import is_held
from harness.model.config import ModelConfig, load_model_config
from harness.runs.budget import stated_tokens
from harness.runs.checkpoint_meta import CheckpointMeta, read_meta
from harness.runs.checkpoints import BEST, LATEST, choose_start
from harness.runs.directory import RunDirectory, is_run, known_runs
from harness.runs.metrics import BenchmarkEvent, RunProgress, read_last_benchmarks, read_progress, rough_duration
from harness.runs.reported import Reported, read_reported
from harness.runs.results import Results, read_results
from harness.runs.summary import RunSummary, read_summary
from harness.runs.throughput import cost, cost_by_phase
from harness.runs.train_config import load_train_config

# Processes on another machine cannot be checked. A run there counts as "going on" until its metrics.jsonl has had no
# new line for this long.
BELIEVED_SILENCE_SECONDS = 900.0

StateWord = Literal[
    "finished", "going on", "stopped", "diverged", "failed", "never trained", "not trained here", "not made", "damaged"
]  # in the order in which a sweep's status counts them
# The lines that a sweep writes into a run's sweep.log: when it starts the run, when the run's process has ended, and
# when the run has failed.
SWEEP_MARK = re.compile(
    r"\$ .* # (?P<begun>\d+-\d+-\d+ \d+:\d+:\d+ UTC)(, 1 of \d+ groups)?|# took (?P<took>\d+\.\d) s|"
    r"# failed with (?P<failed>exit status -?\d+)"
)
LOG_TAIL_BYTES = 8192
Read = TypeVar("Read")


@dataclass(frozen=True)
class State:
    """State of a run, judged by the files in its folder and by its lock."""

    word: StateWord
    detail: str = ""  # a line with the reason or the progress


@dataclass(frozen=True)
class RunRecord:
    """Record of one run for a comparison. A field that could not be read is empty, and `problems` has a line for it."""

    name: str
    directory: RunDirectory
    state: State
    model: Mapping[str, Any]  # model.json with defaults, or the model that `summary` records
    train: Mapping[str, Any]  # train.json, likewise
    summary: RunSummary | None = None  # None also if the run has trained further since
    progress: RunProgress | None = None  # None if there is a `summary`
    meta: CheckpointMeta | None = None  # of the latest checkpoint; None if there is a `summary`
    results: Results = field(default_factory=Results)
    benchmarks: tuple[BenchmarkEvent, ...] = ()  # the last evaluation while training
    reported: Reported | None = None
    best: str | None = None  # name of the checkpoint that the link `best` points to; None without such a link
    latest: str | None = None
    aside: frozenset[str] = frozenset()  # checkpoints in aside/; their results do not count
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, run: RunDirectory) -> RunRecord:
        """Read a run's folder. Raises no exception, whatever a file contains."""
        problems: list[str] = []

        def attempt(read: Callable[[], Read]) -> Read | None:
            try:
                return read()
            except UserError as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(f"{error.filename or run.path}: cannot be read: {error.strerror}")
            return None

        def latest_meta() -> CheckpointMeta | None:
            checkpoint = choose_start(run.checkpoints, None)
            return read_meta(checkpoint) if checkpoint else None

        summary = attempt(lambda: _read_summary(run))
        is_outdated = summary is not None and _asks_for_more(run, summary)
        if summary is not None and is_outdated:
            continued = attempt(lambda: read_progress(run.metrics))
            if continued is not None and continued.last.tokens_seen > (summary.tokens_seen or 0):
                summary = None
        is_reference = not any(path.exists() for path in (run.train_json, run.summary, run.checkpoints))
        if summary is not None and summary.model and summary.train:
            model, train = summary.model, summary.train
        elif is_reference:
            shape = attempt(lambda: load_model_config(run.model_json)) if run.model_json.exists() else None
            model, train = shape.model_dump(mode="json") if shape else {}, {}
            attempt(lambda: read_reported(run))  # if it cannot be read, the run's state is "damaged"
        else:
            shape = attempt(lambda: load_model_config(run.model_json))
            settings = attempt(lambda: load_train_config(run.train_json))
            model, train = (each.model_dump(mode="json") if each else {} for each in (shape, settings))
        progress = attempt(lambda: read_progress(run.metrics)) if summary is None else None
        meta = attempt(latest_meta) if summary is None else None
        if summary is not None and summary.precision is None:  # written by an earlier version
            with suppress(UserError, OSError):
                summary = summary.model_copy(update={"precision": (last := latest_meta()) and last.precision})
        if summary is not None and not is_outdated:
            state = State("finished")
        elif problems:
            state = State("damaged", problems[0])
        elif is_reference:
            state = State("not trained here")
        else:
            state = _unfinished_state(run, train, progress, meta, is_outdated=is_outdated)
        benchmarks = attempt(lambda: read_last_benchmarks(run.metrics)) or []
        results = read_results(run)
        problems += results.problems
        reported = attempt(lambda: read_reported(run))
        # os.path.realpath does not fail on a loop of links
        links = [Path(os.path.realpath(run.checkpoints / link)) for link in (BEST, LATEST)]
        best, latest = (path.name if path.is_dir() else None for path in links)
        return cls(
            name=run.path.name,
            directory=run,
            state=state,
            model=model,
            train=train,
            summary=summary,
            progress=progress,
            meta=meta,
            results=results,
            benchmarks=tuple(benchmarks),
            reported=reported,
            best=best,
            latest=latest,
            aside=frozenset(path.name for path in run.aside.glob(f"*/{run.checkpoints.name}/*")),
            problems=tuple(dict.fromkeys(problems)),
        )

    @property
    def dataset(self) -> Mapping[str, Any]:
        """The dataset as `TrainingData.record` describes it. Empty if not recorded."""
        dataset = self.recorded("dataset")
        return dataset if isinstance(dataset, dict) else {}

    @property
    def shape(self) -> ModelConfig | None:
        """Configuration of the model, or None if it is not known or not valid."""
        try:
            return ModelConfig.model_validate(dict(self.model))
        except ValidationError:
            return None

    @property
    def tokens_seen(self) -> int | None:
        tokens: int | None = self.progress.last.tokens_seen if self.progress else self.recorded("tokens_seen")
        return tokens

    @property
    def global_batch(self) -> int | None:
        """Number of sequences per optimizer step over all ranks, as last recorded (for a ramp, its last size), or else
        train.json's global_batch_size."""
        parts = [self.recorded(key) for key in ("world_size", "microbatch_size", "accumulation_steps")]
        if None not in parts:
            return int(parts[0] * parts[1] * parts[2])
        asked = self.train.get("global_batch_size")
        return asked if isinstance(asked, int) else None

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase, and in total. Empty if nothing was recorded. Without a summary, the phases are counted up
        to the latest checkpoint, and the total may include time since then."""
        if self.summary:
            return self.summary.seconds
        phases = self.meta.seconds if self.meta else {}
        reported = self.progress.last.seconds if self.progress else None
        if reported is None and not phases:
            return {}
        return {**phases, "total": max(reported or 0.0, sum(phases.values()))}

    @property
    def dollars(self) -> Mapping[str, float]:
        """Dollars by phase, and in total. Time for which no dollars are recorded is counted at train.json's price per
        hour. Empty if there are neither recorded dollars nor a price."""
        if self.summary and self.summary.dollars is not None:
            return self.summary.dollars
        price, meta = self.train.get("price_per_hour"), self.meta
        if self.progress and self.progress.last.dollars is not None:
            phases = meta.dollars if meta else {}
            return {**phases, "total": max(self.progress.last.dollars, sum(phases.values()))}
        if self.summary or meta is None or not meta.dollars:
            return cost_by_phase(self.seconds, price) or {}
        later = max(0.0, self.seconds.get("total", 0.0) - sum(meta.seconds.values()))
        return {**meta.dollars, "total": sum(meta.dollars.values()) + cost(later, price or 0.0)}

    @property
    def changes(self) -> list[str]:
        """The changes made while the run was trained. Empty without a summary."""
        return self.summary.changes if self.summary else []

    def recorded(self, key: str) -> Any:
        """Return the field `key` of `summary` or, without a summary, of `meta`; None if it is not recorded. `key` is a
        field of both `RunSummary` and `CheckpointMeta`."""
        source = self.summary or self.meta
        return None if source is None else getattr(source, key)


def find_runs(runs_dir: Path, names: tuple[str, ...]) -> list[RunDirectory]:
    """Return the runs that `names` select, each once. `names` are names, paths or patterns such as `lr-*`. Without
    `names`, return all runs in `runs_dir`. Raises UserError if a name selects no run, or if there are no runs."""
    if not names and not known_runs(runs_dir):
        raise UserError(f"{runs_dir}: there are no runs; --runs-dir names the folder of your runs")
    patterns = names or ("*",)
    runs = [run for each in patterns for run in RunDirectory.find_all(runs_dir, each, any_name=not names)]
    found = {run.path.name: run for run in runs}
    for run in found.values():
        if not is_run(run.path):
            raise UserError(f"{run.path}: not a run; it has neither train.json, summary.json nor an imported model")
    return list(found.values())


def log_tail(run: RunDirectory) -> list[str]:
    """Return the lines in the last LOG_TAIL_BYTES of a run's sweep.log, or an empty list if it cannot be read. The
    first of these lines may lack its beginning."""
    if not run.sweep_log.is_file():  # a pipe could be read forever
        return []
    try:
        with run.sweep_log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _read_summary(run: RunDirectory) -> RunSummary | None:
    remedy = "move the file away, and start the run again, to rewrite the file from the last checkpoint"
    with explained(after=f"; {remedy}"):
        return read_summary(run.summary) if run.summary.exists() else None


def _asks_for_more(run: RunDirectory, summary: RunSummary) -> bool:
    """Return True if model.json has another shape than the model that `summary` records, or if train.json asks for more
    training than the run has had."""
    with suppress(UserError, OSError):
        model, train = load_model_config(run.model_json), load_train_config(run.train_json)
        key, had = train.budget_key, summary.train
        value = getattr(train, key)
        if value == -1:
            is_enough = had.get(key) == -1 and (had.get("epochs") or 1) == (train.epochs or 1)
        else:
            in_steps = key == "train_steps"
            asked = value if in_steps else stated_tokens(train, model) or math.inf
            reached = (summary.global_steps if in_steps else summary.tokens_seen) or 0
            is_enough = value <= (had.get(key) or 0) or asked <= reached
        # A summary that does not record train.json asks for nothing.
        return (bool(had) and not is_enough) or summary.has_shape(model) is False
    return False


def _unfinished_state(
    run: RunDirectory,
    train: Mapping[str, Any],
    progress: RunProgress | None,
    meta: CheckpointMeta | None,
    *,
    is_outdated: bool,
) -> State:
    """Return the state of a run that has no summary, or only an outdated one (`is_outdated`)."""
    held = is_held(run.lock_file)
    if not held and (end := _last_end(run)):
        return end
    # After an interrupted evaluation, the next process decides whether the run has diverged. The same is true after the
    # last step, because the run may be extended.
    # With stop_if_diverged false, skipped steps alone end a run, at least max_skipped_steps of them.
    has_diverged = meta is not None and meta.has_diverged
    if meta is not None and (meta.interrupted_evaluation or meta.global_step == meta.last_step):
        has_diverged = False
    if meta is not None and train.get("stop_if_diverged") is False:
        has_diverged &= meta.skipped_steps >= train["max_skipped_steps"]
    word: StateWord = "going on" if held else "diverged" if has_diverged else "stopped"
    if is_outdated:
        return State(word, "model.json or train.json asks for a different shape or budget than summary.json records")
    if progress is None and meta is None:
        return State(word, "no report yet") if held else State("never trained")
    silent = progress.silent_seconds if progress else math.inf
    said = f"last line in metrics.jsonl {rough_duration(silent)} ago" if progress else "no line in metrics.jsonl"
    if held is None:  # the lock's owner is of another machine, boot or container
        said += ", on another machine or before a reboot"
        has_gone_on = progress is not None and meta is not None and progress.last.global_step > meta.global_step
        if silent < BELIEVED_SILENCE_SECONDS and (has_gone_on or not has_diverged):
            word = "going on"
    return State(word, said)


def _last_end(run: RunDirectory) -> State | None:
    """Return the state "failed" if the run's last training was in a sweep and failed, otherwise None."""
    with suppress(OSError):
        if run.metrics.stat().st_mtime > run.sweep_log.stat().st_mtime:
            return None
    marks = [found for line in log_tail(run) if (found := SWEEP_MARK.fullmatch(line))]
    return State("failed", marks[-1]["failed"]) if marks and marks[-1]["failed"] else None
