"""The runs of a sweep: derived from its base, checked, found again on the disk."""

from __future__ import annotations

import fnmatch
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import UserError
from harness.common.files import check_name
from harness.common.json_files import strict_json
from harness.common.messages import quoted
from harness.sweeps.derived_runs import Base, DerivedRun, derive
from harness.sweeps.file import Settings, Sweep, read_sweep

LONGEST_SWEEP_NAME = 60
RUNS_DIR = Path("runs")  # unless --runs-dir is given


@dataclass(frozen=True)
class SweepRuns:
    """A sweep's file, and the runs that it describes, checked; none of them may be on the disk yet."""

    path: Path
    name: str
    runs_dir: Path
    runs: list[DerivedRun]

    @property
    def base(self) -> str:
        return self.runs[0].derivation.parent

    def missing(self) -> list[DerivedRun]:
        """Runs that are not made yet. Raises UserError if a folder holds another run."""
        return [run for run in self.runs if not run.is_made()]

    def check_startable(self, runs: Sequence[DerivedRun]) -> None:
        """Raise UserError if training would refuse one of these, of which nothing is made yet."""
        for run in runs:
            try:
                run.check_startable()
            except UserError as error:
                raise UserError(f"{self.path}: makes {error}") from None

    @property
    def runs_dir_option(self) -> str:
        """Option for the runs' folder in a command, after a space; "" where it is the usual one."""
        return "" if self.runs_dir == RUNS_DIR else f" --runs-dir {shlex.quote(str(self.runs_dir))}"


def next_commands(sweep: SweepRuns, datasets_dir: Path) -> str:
    """Commands to type when all runs are finished: measure test losses, and compare."""
    names = [run.name for run in sweep.runs]
    pattern = f"{sweep.name}-*"
    is_exact = set(fnmatch.filter(os.listdir(sweep.runs_dir), pattern)) == set(names)
    named = [shlex.quote(pattern)] if is_exact else names
    option = sweep.runs_dir_option
    return (
        f"\nNext:\n  uv run test_loss.py {shlex.quote(str(datasets_dir))} {' '.join(named)}{option}"
        f"\n  uv run compare_runs.py {' '.join(named)} --baseline {names[0]}{option}"
    )


def load_sweep(path: Path, runs_dir: Path) -> SweepRuns:
    """Read a SWEEP.json and derive its runs, each checked as a run is; nothing is written.

    Raises UserError naming the file, the key and the remedy.
    """
    sweep = read_sweep(path)
    if sweep.is_search:
        raise UserError(
            f'{path}: key "search": makes its runs one by one as it trains them: '
            f"`sweep_runs.py search {path} DATASETS_DIR`"
        )
    name = sweep_name(sweep, path)
    base = load_base(sweep, path, runs_dir)
    runs = []
    for label, point in zip(sweep.names(), sweep.points(), strict=True):
        try:
            runs.append(derive(base, f"{name}-{label}", {**sweep.set, **point}, name))
        except UserError as error:
            raise UserError(f"{path}: makes {error}") from None
    _refuse_equal(path, sweep, runs)
    return SweepRuns(path, name, runs_dir, runs)


def load_base(sweep: Sweep, path: Path, runs_dir: Path) -> Base:
    """The run to derive from. Raises UserError."""
    try:
        return Base.load(runs_dir, sweep.base)
    except UserError as error:
        raise UserError(f'{path}: key "base": {error}') from None


def sweep_name(sweep: Sweep, path: Path) -> str:
    name = path.stem if sweep.name is None else sweep.name
    try:
        if len(name) > LONGEST_SWEEP_NAME:
            raise UserError(f"longer than {LONGEST_SWEEP_NAME} characters")
        return check_name(name, "sweep")
    except UserError as error:
        raise UserError(f'{path}: key "name" (or else the file\'s): {error}') from None


def _refuse_equal(path: Path, sweep: Sweep, runs: list[DerivedRun]) -> None:
    """Two runs that are the same: a value that is given twice, or two spellings of one."""
    seen: dict[str, int] = {}
    for position, run in enumerate(runs):
        settings = json.dumps(run.settings)
        if settings in seen:
            both = sweep.describe_equal(seen[settings], position)
            raise UserError(f"{path}: {both} would be the same run; remove one of the values")
        seen[settings] = position


def parse_settings(texts: Sequence[str]) -> Settings:
    """`key=value` of a command line, several times: a value is JSON, or else a string. Raises UserError."""
    settings: Settings = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise UserError(f"--set {quoted(text)}: must be KEY=VALUE, such as learning_rate=0.001")
        if key in settings:
            raise UserError(f"--set {key}: given twice; keep one")
        try:
            settings[key] = strict_json(value)
        except (ValueError, RecursionError):
            settings[key] = value
    return settings
