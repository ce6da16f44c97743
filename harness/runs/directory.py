"""A run directory: the paths inside `runs/<name>/`, finding runs by their names, moving old results aside, and the
run's lock."""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from harness.common.errors import UserError, explained
from harness.common.files import check_inside, check_name, check_writable, move
from harness.common.lock import RunLock
from harness.common.messages import quoted, tell
from harness.model.tensor_names import WEIGHTS

PATTERN = re.compile(r"[*?[]")  # characters of a pattern, none of which can be in a run's name
NAME_OF_SECOND = "%Y%m%dZ%H%M%S"
SEARCH_PREFIX = "microbatch-search-"  # of the file names of microbatch searches' results
# Environment variable with a secret, set on machines that may read each other's compiled code (see
# harness/training/compile_cache.py).
CACHE_SECRET = "DDP_PRETRAIN_CACHE_SECRET"
CHECKPOINT_NAME = re.compile(r"\d{8}Z\d{6}-iteration-(\d+)")


def known_runs(runs_dir: Path) -> list[str]:
    """Return the names of all runs in `runs_dir`, sorted. The list is empty if there is no such folder."""
    return sorted(path.name for path in runs_dir.iterdir() if is_run(path)) if runs_dir.is_dir() else []


def is_run(path: Path) -> bool:
    """Return True if a folder holds a run, an imported model or published figures. A hidden folder does not count,
    because it may be incomplete."""
    names = ("train.json", "summary.json", "reported.json", WEIGHTS)
    return not path.name.startswith(".") and any((path / name).is_file() for name in names)


@cache
def _tell_left_out(reason: str) -> None:
    """Print on standard error why `find_all` leaves a run out, each reason only once per process."""
    tell(f"left out: {reason}")


def _plain_name(runs_dir: Path, text: str) -> str:
    """Return the name of the run that `text` gives, as a name or as the path of a folder in `runs_dir`. The run need
    not exist. Raises UserError if `text` is neither."""
    text = text.rstrip(os.sep)
    if os.sep not in text or "\0" in text:
        return check_name(text, "run")
    path = os.path.abspath(text)
    if os.path.realpath(os.path.dirname(path)) == os.path.realpath(runs_dir):
        return check_name(os.path.basename(path), "run")
    where = f"{os.path.abspath(runs_dir)} (--runs-dir)"
    raise UserError(f"run {quoted(text)}: must be a plain name, or the path of a run in {where}")


def unused_name(folder: Path, ending: str = "") -> Path:
    """Return an unused path in `folder`. Its name is the current second (UTC), or the first later one that is free,
    followed by `ending`."""
    moment = time.time()
    while True:
        path = folder / f"{time.strftime(NAME_OF_SECOND, time.gmtime(moment))}{ending}"
        if not path.exists():
            return path
        moment += 1


def step_of(name: str) -> int:
    """Return the global step in a checkpoint's name, or -1 if `name` is not such a name."""
    match = CHECKPOINT_NAME.fullmatch(name)
    return int(match.group(1)) if match else -1


def recency(name: str) -> tuple[int, str]:
    """Return a key that sorts the names of checkpoints by step, then by date. A resumed run can have two checkpoints of
    the same step."""
    return step_of(name), name


class RunDirectory:
    """The paths in the folder of one run. `model.json` and `train.json` are the run's inputs, and `reported.json` is
    written by hand; all three may be missing. Commands write the other files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model_json = path / "model.json"
        self.train_json = path / "train.json"
        self.reported = path / "reported.json"  # figures that somebody else has published for this run
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.chart = path / "training-run-chart.png"
        self.checkpoints = path / "checkpoints"
        self.results = path / "results"  # measurements of checkpoints, and results of microbatch searches (-f)
        self.sweep_log = path / "sweep.log"  # output of the run's processes in a sweep, and how the last of them ended
        self.machine_check = path / "machine-check.json"  # the speed that check_machine.py has measured
        self.compile_cache = path / "compile-cache"  # compiled code, which --restart leaves where it is
        self.aside = path / "aside"  # folders of old results
        self.lock_file = path / ".lock"

    @classmethod
    def find(cls, runs_dir: Path, name: str) -> RunDirectory:
        """Return the run `runs_dir/name`. `name` may also be the path of that folder. The folder's files need not
        exist. Raises UserError if the name is invalid, or if there is no such folder inside `runs_dir`."""
        path = runs_dir / _plain_name(runs_dir, name)
        if path.is_dir():
            check_inside(path, runs_dir, "--runs-dir")
            return cls(path)
        if path.exists():
            raise UserError(f"{path}: not a folder; a run is a folder with model.json and train.json")
        known = known_runs(runs_dir)
        near = difflib.get_close_matches(path.name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
        if not known:
            there = "there are none in" if runs_dir.is_dir() else "there is no folder"
            hint = f"{there} {os.path.abspath(runs_dir)}; --runs-dir names the folder of your runs"
        raise UserError(f"{path}: no such run; {hint}")

    @classmethod
    def find_all(cls, runs_dir: Path, name: str, *, any_name: bool = False) -> list[RunDirectory]:
        """Return the run `name`, or all runs whose names match the pattern `name` (`lr-*`), sorted. Matching runs that
        `find` would refuse are left out, with a line on standard error. With `any_name`, runs with an invalid name are
        kept. Raises UserError if no run is found."""
        if not PATTERN.search(name):
            return [cls.find(runs_dir, name)]
        folder, pattern = os.path.split(name)
        inside = not folder or os.path.realpath(folder) == os.path.realpath(runs_dir)
        found = fnmatch.filter(known_runs(runs_dir), pattern) if inside else []
        if not found:
            raise UserError(
                f"{runs_dir / pattern if inside else name}: no run in {runs_dir} matches; --runs-dir names the folder "
                "of your runs"
            )
        runs, refused = [], []
        for each in found:
            try:
                if not any_name:
                    with explained(after="; rename the folder"):
                        check_name(each, "run")
                check_inside(runs_dir / each, runs_dir, "--runs-dir")
                runs.append(cls(runs_dir / each))
            except UserError as error:
                refused.append(error)
        if not runs:
            raise refused[0]
        for reason in map(str, refused):
            _tell_left_out(reason)
        return runs

    def check_outputs(self) -> None:
        """Raise UserError if the run's folder or `checkpoints/` is not writable, or if metrics or summary exist but are
        not regular files."""
        check_writable(self.path)
        if os.path.lexists(self.checkpoints):  # it may be a file, or a link to a folder that is gone
            check_writable(self.checkpoints)
        for path in (self.metrics, self.summary):
            if path.exists() and not path.is_file():
                raise UserError(f"{path}: not a regular file; move it away")

    def new_aside(self) -> Path:
        """Create a new folder below `aside/`, for old results, and return its path."""
        folder = unused_name(self.aside)
        folder.mkdir(parents=True)
        return folder

    def set_results_aside(self) -> Path | None:
        """Move checkpoints, metrics, summary, chart and `results/` to a new folder below `aside/`. Return that folder.
        Moves nothing and returns None if there is nothing but results of microbatch searches (-f). Raises RunError or
        OSError if a move fails."""
        entries = [*self.checkpoints.iterdir()] if self.checkpoints.is_dir() else []
        entries.sort(key=lambda path: (path.is_symlink(), *recency(path.name)))  # the links `best` and `latest` last
        files = [path for path in (self.summary, self.metrics, self.chart) if path.is_file()]
        measurements = [path.name for path in self.results.iterdir()] if self.results.is_dir() else []
        # The result of a microbatch search (-f) describes the device, not a trained model. If there are no other
        # results, nothing is moved.
        is_measured = any(not name.startswith(SEARCH_PREFIX) for name in measurements)
        if not entries and not files and not is_measured:
            return None
        folder = self.new_aside()
        self.set_summary_and_chart_aside(folder)  # first: with a summary and without checkpoints, training is refused
        if measurements:  # before the checkpoints: `results/` never has measurements of weights that are gone
            move(self.results, folder / self.results.name)
        if entries:  # moved one by one, because the folder may be a link to a larger disk
            (folder / self.checkpoints.name).mkdir()
        for path in entries:
            move(path, folder / self.checkpoints.name / path.name)
        if self.metrics.is_file():
            move(self.metrics, folder / self.metrics.name)
        return folder

    def set_measurements_aside(self, last_step: int, make_aside: Callable[[], Path]) -> None:
        """Move aside the measurements of checkpoints after global step `last_step`. `make_aside` returns a folder for
        them, the same one at each call. It is called only if a file is moved. Raises RunError or OSError if a move
        fails."""
        for path in sorted(self.results.iterdir()) if self.results.is_dir() else []:
            checkpoint = CHECKPOINT_NAME.search(path.name)  # a measurement's file name contains this
            if checkpoint and int(checkpoint.group(1)) > last_step:
                folder = make_aside() / self.results.name
                folder.mkdir(exist_ok=True)
                move(path, folder / path.name)

    def set_summary_and_chart_aside(self, folder: Path) -> None:
        """Move the summary and the chart, if there are any, into `folder`. Raises RunError if a move fails."""
        for path in (self.summary, self.chart):
            if path.exists():
                move(path, folder / path.name)

    def lock(self) -> RunLock:
        """Lock this run for this process, and return the lock, which is held until `release` or the process's end.
        Raises UserError if another process has the lock, and RunError if the lock file cannot be written."""
        return RunLock.take(self.lock_file, "trained")
