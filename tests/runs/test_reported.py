"""The reported figures that ship with the notebook's runs equal the published ones, and agree with each other where the
published ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.common.json_files import read_json_object
from harness.data.loader import BatchLayout
from harness.runs.directory import RunDirectory
from harness.runs.reported import Reported, read_reported
from harness.runs.train_config import load_train_config
from tests.runs.test_shipped_runs import MACHINES
from tests.support.configs import refusal
from tests.support.isolation import SHIPPED_RUNS

# The source's table of costs: whole seconds, dollars, number of validations, seconds of each validation, dollars of all
# validations, and dollars and seconds without validations.
COSTS: dict[str, tuple[float, ...]] = {
    "8xa100m40": (13_904, 39.86, 50, 30, 4.30, 35.56, 12_404),
    "8xh100m80": (6_650, 44.19, 24, 38, 6.06, 38.13, 5_738),
    "8xa100m80": (11_532, 45.87, 24, 66, 6.30, 39.57, 9_948),
    "8xb200m160": (4_190, 46.46, 11, 60, 7.32, 39.14, 3_530),
}
COST_FIGURES = (
    *("train_dollars", "validation_runs", "validation_seconds_each", "validation_dollars"),
    *("dollars_without_validation", "seconds_without_validation"),
)
LOSS_FIGURES = ("final_train_loss", "final_validation_loss", "test_loss", "instruction_score")
LOSSES: dict[str, tuple[float, ...]] = {
    "8xa100m40": (3.720, 3.675, 3.674, 17.09),
    "8xh100m80": (4.091, 3.729, 3.725, 11.98),
    "8xa100m80": (3.771, 3.723, 3.730, 11.71),
    "8xb200m160": (3.865, 3.770, 3.771, 13.89),
}


def shipped(name: str) -> Reported:
    found = read_reported(RunDirectory(SHIPPED_RUNS / name))
    assert found is not None
    return found


def values(name: str, *figures: str) -> tuple[float | None, ...]:
    reported = shipped(name)
    return tuple(reported.value(figure) for figure in figures)


@pytest.mark.parametrize("name", MACHINES)
def test_the_figures_of_the_source(name: str) -> None:
    """The figures that ship with the runs are the published ones, and agree with each other. The published dollars are
    computed from the time in whole seconds."""
    reported = shipped(name)
    seconds, *figures = COSTS[name]
    dollars, runs, each, validation, without, seconds_without = figures
    assert values(name, *COST_FIGURES) == tuple(figures)
    assert values(name, *LOSS_FIGURES) == LOSSES[name]
    microbatch, price, steps, tokens = MACHINES[name]
    assert values(name, "price_per_hour", "tokens_seen") == (price, tokens)
    assert round(seconds * price / 3600, 2) == dollars
    assert round(runs * each * price / 3600, 2) == validation
    assert round(dollars - validation, 2) == without
    assert seconds - runs * each == seconds_without
    exact = reported.value("train_seconds")
    assert exact is not None
    assert int(exact) == seconds
    assert reported.value("tokens_per_second") == round(tokens / exact) == reported.whole_run_speed
    assert reported.training_speed == tokens / seconds_without
    assert reported.value("global_steps") in (steps, None)
    assert reported.layout == BatchLayout(8, 1, microbatch, 1024)


def test_the_run_on_one_gpu_and_the_checkpoint_that_was_not_the_best() -> None:
    assert values("8xh100m80", "test_loss_latest", "instruction_score_latest") == (3.734, 17.91)
    reported = shipped("original")
    assert values("original", "test_loss", "instruction_score", "microbatch_size") == (3.944, 16.01, 6)
    assert (reported.gpus, reported.memory_gib, reported.device) == (1, 24, "RTX 3090")
    assert reported.whole_run_speed is None, "only a speed at the beginning is reported"
    assert reported.training_speed == 19_678
    assert 3_260_190_720 / reported.training_speed / 3600 == pytest.approx(46.0, abs=0.1), "its progress bar: 46:02:23"


@pytest.mark.parametrize("name", [*MACHINES, "original"])
def test_every_figure_has_a_unit_and_a_place(name: str) -> None:
    reported = shipped(name)
    assert reported.address is not None
    assert reported.address.startswith("https://www.gilesthomas.com/2026/01/")
    assert reported.model == read_json_object(SHIPPED_RUNS / name / "model.json")
    for figure in reported.figures.values():
        assert figure.unit
        assert len(figure.place) > 15
    config = load_train_config(SHIPPED_RUNS / name / "train.json")
    assert reported.value("microbatch_size") == config.microbatch_size


def write(folder: Path, figures: dict[str, Any], **changes: Any) -> RunDirectory:
    made = {name: {"value": value, "unit": "x", "place": "y"} for name, value in figures.items()}
    reported = read_json_object(SHIPPED_RUNS / "8xa100m40" / "reported.json") | {"figures": made} | changes
    (folder / "reported.json").write_text(json.dumps(reported))
    return RunDirectory(folder)


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"test_loss": -1}, '"figures.test_loss.value": '),
        ({"test_loss": 1e19}, '"figures.test_loss.value": '),
        ({"test_loss": "13"}, '"figures.test_loss.value": '),
        ({"test_loss": None}, '"figures.test_loss.value": '),
        ({"train_seconds": 0.0}, '"figures.train_seconds.value": must be above 0'),
        ({"global_batch_size": 0.0}, '"figures.global_batch_size.value": must be above 0'),
        ({"tran_seconds": 5.0}, '"figures.tran_seconds": unknown; did you mean "train_seconds"?'),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_its_key(tmp_path: Path, figures: dict[str, Any], said: str) -> None:
    assert f"reported.json: key {said}" in refusal(read_reported, write(tmp_path, figures))
    assert 'key "gpu": unknown; did you mean "gpus"' in refusal(read_reported, write(tmp_path, {}, gpu=8))


def test_what_the_figures_leave_open_is_none(tmp_path: Path) -> None:
    def figures(**given: float) -> Reported:
        found = read_reported(write(tmp_path, given))
        assert found is not None
        return found

    assert read_reported(RunDirectory(tmp_path)) is None
    assert [figures().training_speed, figures().whole_run_speed, figures().layout] == [None, None, None]
    whole = {"tokens_seen": 1000.0, "train_seconds": 100.0, "tokens_per_second": 10.0}
    assert figures(**whole).training_speed is None, "the time of validation is not reported"
    assert figures(**whole, seconds_without_validation=50.0).training_speed == 20.0
    assert figures(microbatch_size=13.0, global_batch_size=100.0).layout is None
    assert figures(microbatch_size=0.5, global_batch_size=4.0).layout is None
    nothing = figures(seconds_without_validation=0.0)
    assert [nothing.training_speed, nothing.whole_run_speed] == [None, None]
    others = {"test_loss_latest": 0.0, "validation_dollars": 0.0}
    assert figures(**others).value("test_loss_latest") == 0.0, "figures of other names are kept"
