"""Sweeps of small runs, for the tests of sweeps."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from harness.sweeps.derived_runs import DerivedRun, write_runs
from harness.sweeps.file import SweepRuns, load_sweep
from harness.sweeps.plan import status_of
from tests.support.in_process import run_here
from tests.support.launch import PATIENCE_SECONDS, ROOT, Result, Workshop
from tests.support.planning import write_summary
from tests.support.warm import FORK_PYTHONS, WarmProcess


def load(shop: Workshop, **keys: Any) -> SweepRuns:
    """Write s.json with "base" and these keys, and load it."""
    path = shop.path / "s.json"
    path.write_text(json.dumps({"base": "base", **keys}))
    return load_sweep(path, shop.runs)


def make(shop: Workshop, **keys: Any) -> SweepRuns:
    """Load s.json with these keys, and write its missing runs."""
    sweep = load(shop, **keys)
    write_runs(sweep.missing())
    return sweep


def states(sweep: SweepRuns) -> dict[str, str]:
    """Return the state of each run of a sweep, by the run's name without "s-"."""
    return {run.name.removeprefix("s-"): status_of(run).state for run in sweep.runs}


def start(shop: Workshop, *options: str, prelude: str = "") -> WarmProcess:
    """Start `sweep_runs.py run s.json DATASETS_DIR` with these options. The runs and ranks that it starts are forked
    from it. The Python source `prelude` runs first."""
    words = [str(ROOT / "sweep_runs.py"), "run", str(shop.path / "s.json"), str(shop.datasets), *options]
    return shop.fork([*words, "--runs-dir", str(shop.runs)], {}, FORK_PYTHONS + prelude)


def command(shop: Workshop, name: str, *arguments: str) -> Result:
    """Run one of the repository's commands, and return its result, whatever its exit status."""
    return run_here(name, *arguments, "--runs-dir", shop.runs, status=None)


def sweep_command(shop: Workshop, verb: str, *arguments: str) -> Result:
    """Run `sweep_runs.py VERB s.json ...`."""
    return command(shop, "sweep_runs.py", verb, str(shop.path / "s.json"), *arguments)


def add_summary(run: DerivedRun, **values: Any) -> None:
    write_summary(run.directory, run.model_config, run.train_config, **values)


def when(condition: Callable[[], object], then: Callable[[], object]) -> None:
    """Call `then` from a thread once `condition` holds."""

    def watch() -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        then()

    threading.Thread(target=watch, daemon=True).start()


def log_of(shop: Workshop, name: str) -> str:
    return (shop.runs / name / "sweep.log").read_text()
