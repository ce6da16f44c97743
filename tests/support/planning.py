"""Plans (--plan) made in the test process, the rows of their tables, and summaries from which a plan takes its
speed."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from harness.common.options import TrainOptions
from harness.model.config import ModelConfig
from harness.planning.experiment import Experiment
from harness.planning.plan import print_plan
from harness.runs.directory import RunDirectory
from harness.runs.train_config import TrainConfig
from tests.support.launch import Workshop

EIGHT: dict[str, Any] = {"assume_world_size": 8}


def shipped(folder: Path, name: str, **train: Any) -> Workshop:
    """Return a Workshop with a copy of a shipped run, with keys of train.json changed, and without datasets."""
    where = Workshop(folder)
    where.add_shipped_run(name, **train)
    return where


def experiment_of(shop: Workshop, run: str = "r") -> Experiment:
    return Experiment.load(RunDirectory.find(shop.runs, run), shop.datasets)


def plan(shop: Workshop, run: str = "r", checkpoint: str | None = None, *, ranks: int = 1, **options: Any) -> str:
    """Return the text of a run's plan, which must fit a terminal of 80 columns. Raises UserError if the command would
    refuse the run."""
    given = TrainOptions(plan=True, runs_dir=shop.runs, **options)
    given.check(checkpoint)
    experiment = experiment_of(shop, run)
    experiment.check_dataset(ask_hub=False)
    with redirect_stdout(io.StringIO()) as printed:
        print_plan(experiment, checkpoint, ranks, given)
    assert [line for line in printed.getvalue().splitlines() if len(line) > 80] == []
    return printed.getvalue()


def rows(shop: Workshop, run: str = "r", checkpoint: str | None = None, **options: Any) -> dict[str, str]:
    """Return the table of a run's plan as a dict from label to text, with wrapped lines joined."""
    return table(plan(shop, run, checkpoint, **options))


def table(printed: str) -> dict[str, str]:
    found: dict[str, str] = {}
    label = ""
    for line in printed[printed.index("\nparameters ") :].splitlines()[1:]:
        match = re.fullmatch(r"(\S.*?)?  +(\S.*)", line)
        assert match, line
        label = match[1] or label
        found[label] = f"{found[label]} {match[2]}" if label in found else match[2]
    return found


def number(text: str) -> int:
    """Return the whole number that a text begins with."""
    match = re.match(r"[\d,]+", text)
    assert match, text
    return int(match[0].replace(",", ""))


def dollars(found: dict[str, str]) -> list[float]:
    """Return the amounts in the cost row of a plan's table, in order."""
    return [float(each.replace(",", "")) for each in re.findall(r"\$([\d.,]*\d)", found["cost"])]


def add_summary(shop: Workshop, run: str = "r", **values: Any) -> None:
    experiment = experiment_of(shop, run)
    write_summary(experiment.run, experiment.model, experiment.config, **values)


def write_summary(run: RunDirectory, model: ModelConfig, train: TrainConfig, /, **values: Any) -> None:
    """Write the summary of a run of 30 steps in 20 s, with some values changed. A key whose value is `...` is left
    out."""
    summary = {"model": model.model_dump(mode="json"), "world_size": 1, "microbatch_size": 2}
    summary |= {"train": train.model_dump(mode="json"), "accumulation_steps": 2, "device": "an abacus"}
    summary |= {"tokens_per_second": 96.0, "measured": {"global_steps": 30, "tokens": 1920, "seconds": 20.0}}
    kept = {key: value for key, value in (summary | values).items() if value is not ...}
    (run.path / "summary.json").write_text(json.dumps(kept))
