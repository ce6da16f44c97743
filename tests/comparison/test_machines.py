"""Projected time and cost of a run on other machines: the notebook's figures, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.common.json_files import read_json_object
from harness.comparison.inconclusive import Inconclusive
from harness.comparison.machines import KnownSpeed, Projection, known_speeds, machine_lines, project, read_work
from harness.data.loader import BatchLayout
from harness.model.config import load_model_config
from harness.planning.machines import PRICES, Machine, read_machines
from harness.runs.directory import RunDirectory
from tests.runs.test_reported import COSTS
from tests.runs.test_shipped_runs import MACHINES
from tests.support.isolation import SHIPPED_RUNS
from tests.support.launch import Workshop

SHIPPED = [RunDirectory(SHIPPED_RUNS / name) for name in [*MACHINES, "original"]]
KNOWN = [speed for run in SHIPPED for speed in known_speeds(run)]
BY_NAME = {each.machine: each for each in read_machines()}
OWN = {
    "8xa100m40": "8x A100 40 GiB",
    "8xh100m80": "8x H100 80 GiB",
    "8xa100m80": "8x A100 80 GiB",
    "8xb200m160": "8x B200 160 GiB",
}


def projected(name: str, machine: Machine, known: list[KnownSpeed]) -> Projection | Inconclusive:
    work = read_work(RunDirectory(SHIPPED_RUNS / name))
    assert not isinstance(work, Inconclusive)
    return project(name, *work, machine, known)


def text_of(*arguments: Any) -> str:
    lines = list(machine_lines(*arguments))
    assert max(map(len, lines)) <= 80
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("name", MACHINES)
def test_each_of_the_notebooks_runs_on_its_own_machine(name: str) -> None:
    """The projection is the notebook's bill without validation, to the cent."""
    own = projected(name, BY_NAME[OWN[name]], KNOWN)
    assert isinstance(own, Projection)
    assert (own.basis, own.uncertainty, own.note) == ("reported", 0, "")
    assert round(own.hours * 3600) == COSTS[name][-1]
    assert round(own.dollars, 2) == COSTS[name][-2]


def test_a_measured_speed_comes_before_a_reported_one_and_that_before_an_estimate() -> None:
    machine, name = BY_NAME["8x A100 40 GiB"], "8xa100m40"
    reported = next(each for each in KNOWN if each.run == name)
    mine = replace(reported, run="mine", basis="measured", device="NVIDIA A100-SXM4-40GB", tokens_per_second=1e6)
    found = projected(name, machine, [*KNOWN, replace(mine, train={})])
    assert isinstance(found, Projection)
    assert (found.basis, found.tokens_per_second, found.note) == ("measured", 1e6, "measured of mine, microbatch 13")
    fp32, deeper = replace(mine, train={"precision": "fp32"}), mine.model.model_copy(update={"n_layers": 6})
    for other in (fp32, replace(mine, model=deeper), replace(mine, layout=BatchLayout(4, 1, 13, 1024))):
        found = projected(name, machine, [*KNOWN, other])
        assert isinstance(found, Projection)
        assert found.basis == "reported", "other kernels, another model, or fewer GPUs"
    found = projected(name, machine, [])
    assert isinstance(found, Projection)
    assert found.basis == "estimated"
    assert 0 < found.uncertainty < 1


@pytest.mark.parametrize(
    ("run", "changes", "reason"),
    [
        ("original", {}, "its global batch of 6 sequences cannot be divided by 8 GPUs"),
        ("8xa100m40", {"device": "Abacus 9"}, "no speed on such a machine is known, and none is estimated: nothing is"),
        ("8xa100m40", {"gpus": 13}, "no speed on such a machine is known, and none is estimated: 13 ranks are more"),
        ("quickstart-gpt2", {}, "no speed on such a machine is known, and none is estimated: launching the kernels"),
    ],
)
def test_machines_of_which_nothing_is_known(run: str, changes: dict[str, Any], reason: str) -> None:
    found = projected(run, BY_NAME["8x A100 40 GiB"].model_copy(update=changes), [])
    assert isinstance(found, Inconclusive)
    assert found.reason.startswith(reason)


def test_the_table_of_the_notebooks_first_run(tmp_path: Path) -> None:
    lines = list(machine_lines(RunDirectory(SHIPPED_RUNS / "8xa100m40"), SHIPPED))
    assert [" ".join(line.split()) for line in lines if line.endswith("reported")] == [
        "8x A100 40 GiB 10.32 262,840 3.45 35.56 reported",
        "8x H100 80 GiB 23.92 568,186 1.59 38.13 reported",
        "8x B200 160 GiB 39.92 923,668 0.98 39.14 reported",
        "8x A100 80 GiB 14.32 327,739 2.76 39.57 reported",
    ], "the cheapest first"
    text = text_of(RunDirectory(SHIPPED_RUNS / "8xa100m40"), SHIPPED)
    assert "Training alone: validation, checkpoints and set-up come on top" in text
    assert "Compare machines of one basis" in text
    assert "Prices of 2025-12-05: Lambda" in text
    values = read_json_object(PRICES)
    values["machines"][0]["machine"] = "a machine with a very long name that somebody rents from somebody else"
    (tmp_path / "prices.json").write_text(json.dumps(values))
    text_of(RunDirectory(SHIPPED_RUNS / "8xa100m40"), SHIPPED, tmp_path / "prices.json")


def test_the_speeds_of_a_run_folder(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    run = RunDirectory(shop.add_run(min_train_tokens=1280))
    work = read_work(run)
    assert not isinstance(work, Inconclusive)
    assert work[2:] == (BatchLayout(1, 2, 2, 16), 1280)
    assert known_speeds(run) == []
    model = load_model_config(run.model_json)
    summary = {"model": model.model_dump(mode="json"), "world_size": 2, "microbatch_size": 2, "accumulation_steps": 2}
    summary |= {"device": "NVIDIA H200", "tokens_per_second": 96.0, "tokens_seen": 640}
    summary |= {"measured": {"global_steps": 30, "tokens": 1920, "seconds": 20.0}}
    run.summary.write_text(json.dumps(summary))
    layout = BatchLayout(2, 2, 2, 16)
    assert known_speeds(run) == [KnownSpeed("r", "measured", "NVIDIA H200", layout, model, {}, 96.0)]
    # Too little to be believed; and a length that is known only after training.
    run.summary.write_text(json.dumps(summary | {"measured": {"global_steps": 3, "tokens": 192, "seconds": 2.0}}))
    assert known_speeds(run) == []
    shop.add_run(min_train_tokens=-1)
    work = read_work(run)
    assert not isinstance(work, Inconclusive)
    assert work[-1] == 640
    run.summary.unlink()
    assert text_of(run, []) == (
        "r on other machines: inconclusive, because its min_train_tokens is -1, all there is, and it has not "
        "trained yet"
    )


def test_a_broken_neighbour_is_passed_over_and_a_broken_run_is_not(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    broken = RunDirectory(shop.add_run("broken"))
    broken.summary.write_text("{")
    run = RunDirectory(shop.add_run())
    assert "r on other machines: " in text_of(run, [run, broken])
    with pytest.raises(UserError, match=r"summary.json:1: not valid JSON"):
        list(machine_lines(broken, []))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"price_per_hour": -1.0}, 'prices.json, machine 1: key "price_per_hour"'),
        ({"date": "yesterday"}, 'prices.json, machine 1: key "date"'),
        ({"date": "2026-13-01"}, 'prices.json, machine 1: key "date": month must be in 1..12, not "2026-13-01"'),
        ({"memory_gib": 4.0}, 'prices.json, machine 1: key "memory_gib": 4, but "device" is "[^"]*40GB'),
        ({"prise_per_hour": 1.0}, 'machine 1: key "prise_per_hour": unknown; did you mean "price_per_hour"'),
        ({"gpus": 0}, 'prices.json, machine 1: key "gpus"'),
    ],
    ids=str,
)
def test_a_wrong_list_of_prices_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    values = read_json_object(PRICES)
    values["machines"][0] |= change
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=words):
        read_machines(path)


def test_a_machine_that_is_there_twice(tmp_path: Path) -> None:
    values = read_json_object(PRICES)
    values["machines"].append(values["machines"][0])
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match='"8x A100 40 GiB" is there twice'):
        read_machines(path)


def test_the_shipped_prices_are_the_notebooks() -> None:
    prices = {each.machine: each.price_per_hour for each in read_machines()}
    assert {OWN[name]: MACHINES[name][1] for name in MACHINES}.items() <= prices.items()
    assert prices["2x H100 80 GiB"] == 6.38
    assert all(each.date == "2025-12-05" for each in read_machines()), "the day of its first cloud train"
