"""Time and cost of a run on other machines: the notebook's figures, the choice between measured and reported speeds,
and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.common.json_files import read_json_object
from harness.comparison.machines import machine_lines
from harness.planning.machines import PRICES, read_machines
from harness.runs.directory import RunDirectory
from tests.runs.test_reported import COSTS
from tests.runs.test_shipped_runs import MACHINES
from tests.support.isolation import SHIPPED_RUNS
from tests.support.launch import Workshop

SHIPPED = [RunDirectory(SHIPPED_RUNS / name) for name in [*MACHINES, "original"]]
OWN = {
    "8xa100m40": "8x A100 40 GiB",
    "8xh100m80": "8x H100 80 GiB",
    "8xa100m80": "8x A100 80 GiB",
    "8xb200m160": "8x B200 160 GiB",
}


def lines_of(run: RunDirectory, others: list[RunDirectory], *prices: Path) -> list[str]:
    lines = list(machine_lines(run, others, *prices))
    assert max(map(len, lines)) <= 80
    return lines


def text_of(run: RunDirectory, *others: RunDirectory) -> str:
    return " ".join(" ".join(lines_of(run, [*others])).split())


def test_the_table_of_the_notebooks_first_run(tmp_path: Path) -> None:
    run = SHIPPED[0]
    rows = [" ".join(line.split()) for line in lines_of(run, SHIPPED) if line.endswith("reported")]
    assert rows == [
        "8x A100 40 GiB 10.32 262,840 3.45 35.56 reported",
        "8x H100 80 GiB 23.92 568,186 1.59 38.13 reported",
        "8x B200 160 GiB 39.92 923,668 0.98 39.14 reported",
        "8x A100 80 GiB 14.32 327,739 2.76 39.57 reported",
    ], "the cheapest machine first"
    for name in MACHINES:  # the notebook's bill without validation, to the cent
        (row,) = [
            line.split() for line in lines_of(RunDirectory(SHIPPED_RUNS / name), SHIPPED) if OWN[name] + "  " in line
        ]
        assert [float(row[-3]), float(row[-2])] == pytest.approx([COSTS[name][-1] / 3600, COSTS[name][-2]], abs=0.005)
    text = text_of(run, *SHIPPED)
    assert 'Hours and dollars are without validation, set-up and, if the basis is "measured", checkpoints' in text
    assert "8x H100 80 GiB: speed reported for 8xh100m80, microbatch 27" in text
    assert "2x H100 80 GiB: inconclusive, because no speed of this run's model and kernels is known there" in text
    assert "Prices of 2025-12-05: Lambda" in text
    values = read_json_object(PRICES)
    values["machines"][0]["machine"] = "a machine with a very long name that somebody rents from somebody else"
    (tmp_path / "prices.json").write_text(json.dumps(values))
    lines_of(run, SHIPPED, tmp_path / "prices.json")
    mine = RunDirectory(tmp_path / "mine")  # the price is that of no listed machine, and nothing gives a global batch
    mine.path.mkdir()
    mine.model_json.write_text(run.model_json.read_text())
    mine.train_json.write_text(json.dumps(read_json_object(run.train_json) | {"price_per_hour": 12.5}))
    assert "8x A100 40 GiB 10.32 262,840 3.45 35.56 reported" in text_of(mine, *SHIPPED)
    by_six = text_of(RunDirectory(SHIPPED_RUNS / "original"), *SHIPPED)
    assert "because the run's global batch of 6 sequences cannot be divided among 8 GPUs" in by_six


@pytest.mark.parametrize(
    ("changes", "basis"),
    [
        ({}, "measured"),
        ({"device": "NVIDIA H100 80GB HBM3"}, "reported"),
        ({"world_size": 4}, "reported"),
        ({"accumulation_steps": None}, "reported"),
        ({"train": {"precision": "fp32"}}, "reported"),
        ({"measured": {"global_steps": 3, "tokens": 192, "seconds": 2.0}}, "reported"),
        ({"model": {"depth": 6, "vocab_size": 50257, "context_length": 1024}}, "reported"),
        ({"model": {"a_later_versions": 1}}, "reported"),
    ],
    ids=str,
)
def test_a_measured_speed_of_the_same_training_comes_before_a_reported_one(
    tmp_path: Path, changes: dict[str, Any], basis: str
) -> None:
    run, mine = SHIPPED[0], RunDirectory(tmp_path / "mine")
    mine.path.mkdir()
    summary: dict[str, Any] = {"model": read_json_object(run.model_json), "world_size": 8, "microbatch_size": 13}
    summary |= {
        "accumulation_steps": 1,
        "device": "NVIDIA A100-SXM4-40GB",
        "tokens_per_second": 1e6,
        "tokens_seen": 640,
    }
    summary |= {"measured": {"global_steps": 30, "tokens": 1920, "seconds": 20.0}, **changes}
    mine.summary.write_text(json.dumps(summary))
    lines = lines_of(run, [*SHIPPED, mine])
    (row,) = [line for line in lines if line.startswith("8x A100 40 GiB  ")]
    assert row.split()[-1] == basis
    text = " ".join(" ".join(lines).split())
    assert ("8x A100 40 GiB: speed measured for mine, microbatch 13" in text) is (basis == "measured")
    assert ("Compare only machines with the same basis" in text) is ("measured for mine" in text)


def test_tokens_are_those_of_the_budget_or_of_the_training_that_took_all_there_was(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    run = RunDirectory(shop.add_run(min_train_tokens=1280))
    assert text_of(run).startswith("r on other machines: 1,280 tokens. "), "the batch has as many ranks as the machine"
    shop.add_run(min_train_tokens=1280, gradient_accumulation_steps=None, global_batch_size=4)
    assert text_of(run).startswith("r on other machines: 1,280 tokens in global batches of 4 sequences.")
    shop.add_run(min_train_tokens=None, target_flops=49_152 * 64 * 7.5)
    assert text_of(run).startswith(f"r on other machines: {7 * 64} tokens. ")
    shop.add_run(min_train_tokens=-1)
    assert text_of(run) == (
        "r on other machines: inconclusive, because its number of tokens is not known: min_train_tokens is -1 (the "
        "whole split), and the run has not been trained to its end yet"
    )
    summary = {"world_size": 2, "microbatch_size": 2, "accumulation_steps": 2, "device": "CPU", "tokens_seen": 640}
    run.summary.write_text(json.dumps(summary))
    assert text_of(run).startswith("r on other machines: 640 tokens in global batches of 8 sequences.")
    # The run began with more ranks, whose larger batches its steps were counted in.
    shop.add_run(min_train_tokens=None, train_steps=10)
    budget = {"key": "train_steps", "value": 10, "tokens": 2560}
    run.summary.write_text(json.dumps(summary | {"tokens_seen": 2560, "budget": budget}))
    assert text_of(run).startswith("r on other machines: 2,560 tokens in global batches of 8 sequences.")
    removed = {"key": "target_hours", "value": 1.0, "tokens": 999}  # a key that earlier versions had
    run.summary.write_text(json.dumps(summary | {"budget": removed}))
    assert text_of(run).startswith("r on other machines: 1,280 tokens ")
    meant = RunDirectory(shop.add_run("8xa100m40-mine", min_train_tokens=64 * 8))
    assert text_of(meant).startswith("8xa100m40-mine on other machines: 512 tokens in global batches of 32 sequences.")
    listed = read_json_object(PRICES)["machines"][0] | {"device": "A100 40GB", "gpus": 3, "memory_gib": 40.0}
    (tmp_path / "prices.json").write_text(json.dumps({"machines": [listed]}))
    meant = RunDirectory(shop.add_run("3xa100m40-mine"))
    assert lines_of(meant, [], tmp_path / "prices.json")[0].endswith("tokens in global batches of 12")


def test_a_broken_neighbor_is_passed_over_and_a_broken_run_is_not(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    broken = RunDirectory(shop.add_run("broken"))
    broken.summary.write_text("{")
    run = RunDirectory(shop.add_run())
    assert "r on other machines: " in text_of(run, run, broken)
    with pytest.raises(UserError, match=r"summary.json:1: not valid JSON"):
        list(machine_lines(broken, []))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"price_per_hour": -1.0}, 'prices.json: key "machines.0.price_per_hour"'),
        ({"date": "yesterday"}, 'prices.json: key "machines.0.date"'),
        ({"date": "2026-13-01"}, 'prices.json: key "machines.0.date": .*month'),
        ({"prise_per_hour": 1.0}, 'prices.json: key "machines.0.prise_per_hour": unknown'),
        ({"gpus": 0}, 'prices.json: key "machines.0.gpus"'),
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
