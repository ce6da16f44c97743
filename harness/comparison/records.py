"""Records of runs for a comparison, read from a run's folder: configuration, progress, results, and figures that others
reported. Loads no torch. A broken file becomes a line in the record's `problems`, and the other files are still
read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from harness.common.errors import UserError
from harness.common.lock import is_held
from harness.comparison.progress import Progress, duration, read_last_benchmarks, read_progress
from harness.model.config import ModelConfig, load_model_config
from harness.runs.checkpoint_meta import CheckpointMeta, read_meta
from harness.runs.checkpoints import BEST, LATEST, choose_start
from harness.runs.directory import RunDirectory
from harness.runs.metrics import BenchmarkEvent
from harness.runs.reported import Reported, read_reported
from harness.runs.results import Results, read_results
from harness.runs.summary import RunSummary, read_summary
from harness.runs.throughput import cost_by_phase
from harness.runs.train_config import BUDGETS, load_train_config

# The processes of a run on another machine cannot be seen. It counts as going on for this long after its last line.
BELIEVED_SILENCE_SECONDS = 900.0

StateWord = Literal[
    "finished", "going on", "stopped", "pruned", "failed", "never trained", "not made", "damaged"
]  # in the order in which a sweep's status counts them
# The line that a sweep writes into a run's sweep.log when it starts the run, or when the run has failed or was pruned.
SWEEP_MARK = re.compile(
    r"\$ .* UTC(?:, 1 of \d+ groups)?|# (failed|pruned) (?:with exit status|at global step) (-?\d+)"
)
LOG_TAIL_BYTES = 8192
Read = TypeVar("Read")


@dataclass(frozen=True)
class State:
    """The state of a run, judged by the files in its folder. `detail` adds one line, or is ""."""

    word: StateWord
    detail: str = ""


@dataclass(frozen=True)
class Checkpoints:
    """Names of a run's checkpoints that decide which of its results count: the best, the latest, and those set
    aside."""

    best: str | None = None
    latest: str | None = None
    aside: frozenset[str] = frozenset()  # those of earlier trainings, in aside/


@dataclass(frozen=True)
class RunRecord:
    """Record of one run for a comparison. A field that could not be read is empty, and `problems` has a line for it."""

    name: str
    directory: RunDirectory
    state: State
    model: Mapping[str, Any]  # model.json with defaults; for a finished run, as recorded in summary.json
    train: Mapping[str, Any]  # train.json, likewise
    summary: RunSummary | None = None
    progress: Progress | None = None  # None if the run has a summary
    meta: CheckpointMeta | None = None  # of its latest checkpoint; None if the run has a summary
    results: Results = field(default_factory=Results)
    benchmarks: tuple[BenchmarkEvent, ...] = ()  # the last evaluation while training
    trained_in: str = ""  # precision of the run; "" if there are no such benchmarks
    reported: Reported | None = None
    checkpoints: Checkpoints = Checkpoints()
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, run: RunDirectory) -> RunRecord:
        """Read a run's folder. No content of a file raises an exception. If a file that decides the run's state cannot
        be read, the state is "damaged", with the reason as its detail."""
        return _Reader(run).record()

    @property
    def dataset(self) -> Mapping[str, Any]:
        """Name of the dataset and, by split, the number of tokens and their hash. Empty if nothing was recorded."""
        dataset = self.summary.dataset if self.summary else self.meta.dataset if self.meta else None
        return dataset if isinstance(dataset, dict) else {}

    @property
    def shape(self) -> ModelConfig | None:
        """Configuration of the model. None if it is not known, or if this version cannot represent it."""
        try:
            return ModelConfig.model_validate(dict(self.model))
        except ValidationError:
            return None

    @property
    def torch(self) -> str | None:
        return self._recorded("torch")

    @property
    def device(self) -> str | None:
        """Device of one rank, or None if nothing was recorded."""
        return self._recorded("device")

    @property
    def world_size(self) -> int | None:
        return self._recorded("world_size")

    @property
    def tokens_seen(self) -> int | None:
        if self.progress is not None:
            return self.progress.tokens_seen
        tokens: int | None = self._recorded("tokens_seen")
        return tokens

    @property
    def global_batch(self) -> int | None:
        """Sequences per optimizer step over all ranks, or None if they depend on a number of ranks that is not
        known."""
        parts = [self._recorded(key) for key in ("world_size", "microbatch_size", "accumulation_steps")]
        if None not in parts:
            return int(parts[0] * parts[1] * parts[2])
        asked = self.train.get("global_batch_size")
        return asked if isinstance(asked, int) else None

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase, and in total; empty if nothing was recorded. For an unfinished run, the phases are those up
        to its latest checkpoint, and the total is that of its last report."""
        if self.summary:
            return self.summary.seconds
        phases = self.meta.seconds if self.meta else {}
        reported = self.progress.seconds if self.progress else None
        if reported is None and not phases:
            return {}
        return {**phases, "total": sum(phases.values()) if reported is None else reported}

    @property
    def dollars(self) -> Mapping[str, float]:
        """Dollars by phase, and in total: those of the summary, or else computed from `seconds` and the price per hour.
        Empty without a price."""
        if self.summary and self.summary.dollars is not None:
            return self.summary.dollars
        price = self.train.get("price_per_hour")
        return cost_by_phase(self.seconds, price if isinstance(price, int | float) else None) or {}

    def _recorded(self, key: str) -> Any:
        """Return a value of the summary, or else of the latest checkpoint's meta.json, or else None."""
        source = self.summary or self.meta
        return None if source is None else getattr(source, key)


def read_records(runs_dir: Path, names: tuple[str, ...]) -> list[RunRecord]:
    """Read the records of the runs that `find_runs` returns."""
    return [RunRecord.read(run) for run in find_runs(runs_dir, names)]


def find_runs(runs_dir: Path, names: tuple[str, ...]) -> list[RunDirectory]:
    """Return the runs with these names, paths or patterns (`lr-*`), each once, or all runs in `runs_dir` if `names` is
    empty. Raises UserError if a named run does not exist, or if there are no runs."""
    if not names:
        folders = sorted(path for path in runs_dir.iterdir() if _is_run(path)) if runs_dir.is_dir() else []
        if not folders:
            raise UserError(f"{runs_dir}: there are no runs; --runs-dir names the folder of your runs")
        return [RunDirectory(path) for path in folders]  # names are not checked here
    found = {run.path.name: run for name in names for run in RunDirectory.find_all(runs_dir, name)}
    for run in found.values():
        if not _is_run(run.path):
            raise UserError(f"{run.path}: not a run; it has neither train.json nor summary.json")
    return list(found.values())


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("train.json", "summary.json", "reported.json"))


def log_tail(run: RunDirectory) -> list[str]:
    """Return the last lines of a run's sweep.log, or an empty list if there is no log."""
    try:
        with run.sweep_log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def last_end(run: RunDirectory) -> tuple[Literal["failed", "pruned"], int] | None:
    """Return how the run last ended in a sweep, by its sweep.log: "failed" with the exit status, or "pruned" with the
    global step. None if the log has no such line after the last start, or if the run was resumed without the sweep
    since."""
    with suppress(OSError):
        if run.metrics.stat().st_mtime > run.sweep_log.stat().st_mtime:
            return None
    marks = [found for line in log_tail(run) if (found := SWEEP_MARK.fullmatch(line))]
    if not marks or marks[-1][1] is None:
        return None
    return ("failed" if marks[-1][1] == "failed" else "pruned"), int(marks[-1][2])


class _Reader:
    """Reader of a run's files. It collects what is wrong with them in `problems`."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.problems: list[str] = []

    def record(self) -> RunRecord:
        run = self.run
        summary = self._attempt(self._summary)
        outdated = summary if summary is not None and self._asks_for_more(summary) else None
        if outdated is not None and self._has_continued(outdated):
            summary = None
        model, train = self._configs(summary)
        unfinished = summary is None
        progress = self._attempt(lambda: read_progress(run.metrics)) if unfinished else None
        meta = self._attempt(self._latest_meta) if unfinished else None
        state = self._state(summary, progress, meta, is_outdated=outdated is not None)
        benchmarks = self._attempt(lambda: read_last_benchmarks(run.metrics)) or []
        results = read_results(run)
        self.problems += results.problems
        return RunRecord(
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
            trained_in=self._precision(train, summary) if benchmarks else "",
            reported=self._attempt(lambda: read_reported(run)),
            checkpoints=self._checkpoints(),
            problems=tuple(dict.fromkeys(self.problems)),
        )

    def _attempt(self, read: Callable[[], Read]) -> Read | None:
        try:
            return read()
        except UserError as error:
            self.problems.append(str(error))
        except OSError as error:
            self.problems.append(f"{error.filename or self.run.path}: cannot be read: {error.strerror}")
        return None

    def _configs(self, summary: RunSummary | None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        if summary is not None and summary.model and summary.train:
            return summary.model, summary.train
        model = self._attempt(lambda: load_model_config(self.run.model_json))
        train = self._attempt(lambda: load_train_config(self.run.train_json))
        return (
            model.model_dump(mode="json") if model else {},
            train.model_dump(mode="json") if train else {},
        )

    def _summary(self) -> RunSummary | None:
        try:
            return read_summary(self.run.summary) if self.run.summary.exists() else None
        except UserError as error:
            remedy = "move it away and train again: it is written anew from the last checkpoint"
            raise UserError(f"{error}; {remedy}") from None

    def _asks_for_more(self, summary: RunSummary) -> bool:
        """Return True if model.json asks for another shape or train.json for another or a larger budget than the
        training that `summary` records. Returns False if they cannot be read."""
        with suppress(UserError, OSError):
            model, train = load_model_config(self.run.model_json), load_train_config(self.run.train_json)
            wanted = train.model_dump(include={*BUDGETS})
            had = {key: summary.train.get(key, value) for key, value in wanted.items()}
            is_enough = all(had[key] == value or 0 < (value or 0) <= (had[key] or 0) for key, value in wanted.items())
            return not is_enough or summary.has_shape(model) is False
        return False

    def _has_continued(self, summary: RunSummary) -> bool:
        """Return True if metrics.jsonl has a later line than the training that `summary` records."""
        progress = self._attempt(lambda: read_progress(self.run.metrics))
        return progress is not None and progress.tokens_seen > (summary.tokens_seen or 0)

    def _latest_meta(self) -> CheckpointMeta | None:
        latest = choose_start(self.run.checkpoints, None)
        return read_meta(latest) if latest else None

    def _precision(self, train: Mapping[str, Any], summary: RunSummary | None) -> str:
        """Return the precision that train.json asks for. If that is "auto", return the precision in the latest
        checkpoint, or else "auto" with the device."""
        asked = str(train.get("precision"))
        meta = self._attempt(self._latest_meta) if asked == "auto" else None
        if meta is not None and meta.precision is not None:
            return meta.precision
        device = summary.device if summary else meta.device if meta else None
        return f"{asked} on {device}" if asked == "auto" else asked

    def _checkpoints(self) -> Checkpoints:
        folder = self.run.checkpoints
        links = [Path(os.path.realpath(folder / link)) for link in (BEST, LATEST)]  # realpath accepts a loop of links
        best, latest = (path.name if path.is_dir() else None for path in links)
        aside = frozenset(path.name for path in self.run.aside.glob(f"*/{folder.name}/*"))
        return Checkpoints(best, latest, aside)

    def _state(
        self, summary: RunSummary | None, progress: Progress | None, meta: CheckpointMeta | None, *, is_outdated: bool
    ) -> State:
        """Return the state. `is_outdated` is true if the run's files ask for more than summary.json records."""
        if summary is not None and not is_outdated:
            return State("finished")
        if self.problems:
            return State("damaged", self.problems[0])
        held = is_held(self.run.path / ".lock")
        end = None if held else last_end(self.run)
        if end is not None:
            return State(end[0], f"exit status {end[1]}" if end[0] == "failed" else f"at global step {end[1]:,}")
        if is_outdated:
            return State(
                "going on" if held else "stopped", "its files ask for another shape or budget than summary.json records"
            )
        if progress is None and meta is None:
            return State("going on", "no report yet") if held else State("never trained")
        silent = progress.silent_seconds if progress else 0.0
        said = f"last line {duration(silent)} ago" if progress else ""
        if held is None:  # the lock's owner is on another machine, where its process cannot be seen
            return State("going on" if silent < BELIEVED_SILENCE_SECONDS else "stopped", f"{said}, on another machine")
        return State("going on" if held else "stopped", said)
