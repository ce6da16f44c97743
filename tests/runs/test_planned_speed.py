"""The speed, time and cost of a plan: assumed, measured, reported and estimated speeds, and prices."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.planning import planned_speed
from tests.runs.test_estimated_speed import FAST
from tests.support.configs import refusal
from tests.support.launch import MODEL, Workshop
from tests.support.planning import EIGHT, add_summary, dollars, experiment_of, number, plan, rows, shipped

# The notebook's table: tokens per second of training with validation, whole seconds, dollars with and without
# validation, devices.
BILLS = {
    "8xa100m40": (234_480, 13_904, 39.86, 35.56, "A100 40 GiB"),
    "8xh100m80": (490_249, 6_650, 44.19, 38.13, "H100 80 GiB"),
    "8xa100m80": (282_707, 11_532, 45.87, 39.57, "A100 80 GiB"),
    "8xb200m160": (778_107, 4_190, 46.46, 39.14, "B200"),
}


@pytest.mark.parametrize("given", [{}, {"assume_tps": 1e5}, {"assume_tps_with_validation": 1e5}], ids=str)
def test_a_given_speed_changes_no_price(tmp_path: Path, given: dict[str, Any]) -> None:
    """train.json has the price of eight H100s; two are planned."""
    where = shipped(tmp_path, "8xh100m80")
    found = rows(where, "8xh100m80", assume_world_size=2, **given)
    assert "at $6.38/h" in found["cost"]


@pytest.mark.parametrize("is_reported", [False, True], ids=["assumed", "reported"])
@pytest.mark.parametrize("name", BILLS)
def test_the_notebooks_bills(tmp_path: Path, name: str, is_reported: bool) -> None:
    """A plan from the notebook's speeds has the notebook's cost, to the cent. These speeds include validation, which
    ran on one of the eight GPUs. The cost of validation is the reported one, or an estimate if the speed is given as an
    option. The B200's cost may be off by a cent, because the table drops fractions of seconds, worth 0.4 cents."""
    speed, seconds, total, without, machine = BILLS[name]
    cents = 0.0101 if name == "8xb200m160" else 0.0001
    where = shipped(tmp_path, name, validation_ranks="rank0")
    found = rows(where, name, **EIGHT, assume_tps_with_validation=None if is_reported else speed)
    parts = dollars(found)
    assert parts[2] == pytest.approx(total, abs=cents)
    assert parts[2] == pytest.approx(parts[0] + parts[1], abs=1e-6), "the printed dollars do not add up"
    assert parts[0] == pytest.approx(without, abs=cents if is_reported else 1.40)
    source = f"reported for 8x {machine}" if is_reported else "assumed)"
    assert found["speed"].startswith(f"{speed:,} tokens/s of training and validation together ({source}")
    told = "as reported" if is_reported else "estimated"
    hours = re.search(rf"validation \({told}\) = ([\d.]+) h; training alone: ([\d,]+) tokens/s", found["time"])
    assert hours
    assert float(hours[1]) == pytest.approx(seconds / 3600, abs=0.006)
    if is_reported:
        assert re.search("by Giles Thomas, .*; not measured here; --assume-device ", found["speed"])
    else:  # the printed speed of training alone gives the same cost
        again = rows(where, name, **EIGHT, assume_tps=float(hours[2].replace(",", "")))
        assert dollars(again) == pytest.approx(parts, abs=0.011)


@pytest.mark.parametrize("name", BILLS)
def test_a_bill_with_validation_shared_out(tmp_path: Path, name: str) -> None:
    """A plan of a shipped run shows the notebook's cost of training, and an estimated cost of validation, because the
    run validates on all ranks."""
    found = rows(shipped(tmp_path, name), name, **EIGHT)
    assert "tokens/s of training alone, without validation (reported for 8x " in found["speed"]
    assert f"${BILLS[name][3]} training + $" in found["cost"]
    assert "validation (estimated)" in found["time"]


# Speeds that were measured

MEASURED: dict[str, Any] = {"global_steps": 250, "tokens": 1920, "seconds": 20.0}
NO_SPEED = "no earlier run measured the speed of this model, batch and settings; give --assume-tps"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"world_size": 2}, NO_SPEED),
        ({"microbatch_size": 1}, NO_SPEED),
        ({"model": MODEL | {"n_layers": 3}}, NO_SPEED),
        ({"train": {"precision": "bf16"}}, NO_SPEED),
        ({"tokens_per_second": None}, NO_SPEED),
        ({"measured": MEASURED | {"global_steps": 19}}, "; a plan needs at least 20 steps of training; "),
        ({"measured": MEASURED | {"seconds": 9.99}}, "; a plan needs at least 10 s of training; "),
        ({"measured": MEASURED | {"global_steps": 19, "seconds": 9.9}}, "at least 20 steps and 10 s of training"),
        # An earlier version divided all tokens by its own seconds, also tokens that another program or machine trained.
        ({"measured": ...}, NO_SPEED),
    ],
    ids=str,
)
def test_a_speed_that_is_not_believed(shop: Workshop, values: dict[str, Any], said: str) -> None:
    """The speed of an earlier run is not used if its model, batch or precision differs or if it was too short. The
    speed of another run with a usable speed is then used."""
    shop.add_run("early")
    add_summary(shop, "early", **values)
    shop.add_run()
    assert said in rows(shop)["time and cost"]
    shop.add_run("later")
    add_summary(shop, "later")
    assert rows(shop)["speed"].startswith("96 tokens/s")


def test_the_speed_of_an_earlier_run(shop: Workshop) -> None:
    """A plan uses the speed in the run's own summary if that is usable, otherwise the speed of the longest earlier run
    of the same shape."""
    shop.add_run("early")
    add_summary(shop, "early")
    shop.add_run(price_per_hour=36.0)
    found = rows(shop)
    assert found["speed"].startswith("96 tokens/s of training alone, without validation (measured over 30 steps, 1,920")
    assert "20.0 s of training on an abacus, in" in found["speed"]
    assert f"${1280 / 96 / 100:,.2f} training" in found["cost"]
    assert "time and cost" in rows(shop, assume_world_size=2)
    shop.add_run("later")
    longer = {"global_steps": 300, "tokens": 19_200, "seconds": 300.0}
    add_summary(shop, "later", tokens_per_second=64.0, measured=longer)
    assert rows(shop)["speed"].startswith("64 tokens/s")
    add_summary(shop, tokens_per_second=80.0)
    assert rows(shop, restart=True)["speed"].startswith("80 tokens/s")
    fewer = {key: value for key, value in experiment_of(shop).model.model_dump(mode="json").items() if key != "mlp"}
    add_summary(shop, tokens_per_second=72.0, model=fewer)
    assert rows(shop, restart=True)["speed"].startswith("72 tokens/s"), "a version without a key must count"
    add_summary(shop, measured={"global_steps": 3, "tokens": 192, "seconds": 1.0})
    assert rows(shop, restart=True)["speed"].startswith("64 tokens/s")


def test_an_unreadable_summary_gives_no_speed(shop: Workshop) -> None:
    summary = shop.add_run("other") / "summary.json"
    shop.add_run()
    for text in ("{", "[]", "{}", "\udcff", "null"):
        summary.write_text(text, errors="surrogateescape")
        assert NO_SPEED in rows(shop)["time and cost"]


@pytest.mark.parametrize(("tps", "price"), [(1280, 3600.0), (2.5, 7.2), (1e6, 0.0)])
def test_dollars_are_hours_times_the_price(shop: Workshop, tps: float, price: float) -> None:
    shop.add_run(price_per_hour=price)
    found = rows(shop, assume_tps=tps)
    hours = 1280 / tps / 3600
    assert found["speed"] == f"{tps:,.0f} tokens/s of training alone, without validation (assumed)"
    assert f"${hours * price:,.2f} training" in found["cost"]
    expected = f"{hours:,.2f} h" if hours * 3600 >= 600 else f"{hours * 3600:,.0f} s"
    assert found["time"].startswith(f"{expected} training")
    assert "estimated:" not in found["time"] + found["cost"]


@pytest.mark.parametrize("speed", [{"assume_tps": 10.0}, {"assume_tps_with_validation": 10.0}], ids=str)
def test_without_validation_both_speeds_are_one(shop: Workshop, speed: dict[str, Any]) -> None:
    none: dict[str, Any] = dict.fromkeys(("validation_interval", "validation_batches", "start_val_token"))
    shop.add_run(**none, checkpoint_interval=6, price_per_hour=3600.0)
    assert "$128.00 training + $0.00 validation" in rows(shop, **speed)["cost"]
    shop.add_run()
    assert "no price_per_hour" in rows(shop, **speed)["cost"]


# Speeds that are reported, and the machine that a run is meant for


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        ({}, {}, "(reported for"),  # the machine in the run's name has eight GPUs
        ({"assume_world_size": 4}, {}, "(estimated for 4 x A100 40GB"),
        (EIGHT, {"microbatch_size": 12}, "(estimated for 8 x A100 40GB"),
        (EIGHT, {"gradient_accumulation_steps": 2}, "(estimated for 8 x A100 40GB"),
        (EIGHT, {"precision": "fp16", "compile": False}, "(reported for"),
        (EIGHT | {"assume_tps": 1000.0}, {}, "(assumed)"),
        (EIGHT | {"assume_device": "A100 40GB"}, {}, "(estimated for"),
        ({"ranks": 8, "gpus": ["NVIDIA H200"] * 8}, {}, "(estimated for 8 x H200"),
        ({"ranks": 8, "gpus": ["NVIDIA A100-SXM4-40GB"] * 8}, {}, "(reported for 8x A100 40 GiB"),
    ],
    ids=str,
)
def test_when_a_reported_speed_is_that_of_this_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    """A reported speed is used only for its own number of ranks, batch and device. --assume-tps replaces it."""
    monkeypatch.setattr(planned_speed, "gpu_names", lambda: options.get("gpus", []))
    given = {key: value for key, value in options.items() if key != "gpus"}
    assert said in rows(shipped(tmp_path, "8xa100m40", **changes), "8xa100m40", **given)["speed"]


def test_a_reported_speed_is_its_models(tmp_path: Path) -> None:
    """A reported speed is used only for the reported model, without activation checkpointing, and only if no speed was
    measured. An impossible model in reported.json is an error that names the key."""
    where = shipped(tmp_path, "8xa100m40", activation_checkpointing=True)
    run = where.runs / "8xa100m40"
    time_and_cost = rows(where, run.name, **EIGHT)["time and cost"]
    assert time_and_cost.startswith("unknown: no estimated speed for A100 40GB"), "the reported run had other kernels"
    shipped(tmp_path, run.name)
    on_eight = {"world_size": 8, "microbatch_size": 13, "accumulation_steps": 1, "device": "NVIDIA A100-SXM4-40GB"}
    add_summary(where, run.name, tokens_per_second=500_000.0, **on_eight)
    speed = "500,000 tokens/s of training alone, without validation (measured over 30 steps"
    assert rows(where, run.name, restart=True, **EIGHT)["speed"].startswith(speed)
    (run / "summary.json").unlink()
    model = (run / "model.json").read_text()
    (run / "model.json").write_text(model.replace('"n_layers": 12', '"n_layers": 6'))
    assert "reported" not in rows(where, run.name, **EIGHT)["speed"]
    (run / "model.json").write_text(model)
    (run / "reported.json").write_text((run / "reported.json").read_text().replace('"n_heads": 12', '"n_heads": 0'))
    assert 'reported.json: key "n_heads"' in refusal(plan, where, run.name, **EIGHT)


def test_a_run_is_planned_for_the_machine_that_it_is_named_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without GPUs, --plan assumes the machine after which the run is named, or else the machine whose
    price is in train.json. If one process runs --plan, it assumes all GPUs of that machine."""
    where = shipped(tmp_path, "8xh100m80-fast")
    full = SimpleNamespace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert "are free" not in rows(where, "8xh100m80-fast", ranks=8)["note"], "that machine has another disk"
    found = rows(where, "8xh100m80-fast")
    assert found["machine"].startswith("8x H100 80 GiB (chosen by the run's name; ")
    assert found["global batch"].startswith("8 ranks x 64 sequences")
    assert "(estimated for 8 x H100: 2,490,000 to 3,730,000 tokens/s; " in found["speed"]
    assert "estimated: $5.93 to $8.89" in found["cost"]
    found = rows(where, "8xh100m80-fast", ranks=2)
    assert found["machine"].startswith("2 x H100 in place of 8x H100 80 GiB (chosen by the run's name; ")
    assert "$6.38/h, the price of 2x H100 80 GiB on 2025-12-05" in found["cost"]
    mine = (where.runs / "8xh100m80-fast").rename(where.runs / "mine")
    assert rows(where, "mine")["machine"].startswith("8x H100 80 GiB (chosen by price_per_hour; ")
    train = mine / "train.json"
    train.write_text(train.read_text().replace("23.92", "24"))
    found = rows(where, "mine")
    assert "machine" not in found
    assert found["global batch"].startswith("1 rank x 64 sequences")


@pytest.mark.parametrize(
    ("price", "device", "said"),
    [
        (23.92, "H100", "at $23.92/h, the price of 8x H100 80 GiB"),
        (23.92, "A100 80GB", "at $14.32/h, the price of 8x A100 80 GiB on 2025-12-05"),
        (23.92, "H200", "unknown: train.json's $23.92/h is the price of 8x H100 80 GiB, not of 8 x H200"),
        (30.0, "H200", "at $30.0/h, from train.json"),
    ],
)
def test_dollars_are_not_those_of_another_machine(tmp_path: Path, price: float, device: str, said: str) -> None:
    where = shipped(tmp_path, "8xh100m80", price_per_hour=price)
    assert said in rows(where, "8xh100m80", assume_device=device)["cost"]


def test_a_ceiling_counts_at_the_price_of_the_planned_machine(tmp_path: Path) -> None:
    where = shipped(tmp_path, "8xa100m40", max_dollars=5.0)
    found = rows(where, "8xa100m40", assume_device="H100")
    assert dollars(found)[2] > 5
    # Training would stop by the price in train.json.
    assert found["ceiling"].startswith(
        "max_dollars 5: 0.48 h left at $10.32/h, 0.21 h at $23.92/h (set price_per_hour to that)"
    )


def test_more_gpus_than_a_machine_has_cost_as_much_as_several_machines(tmp_path: Path) -> None:
    where = shipped(tmp_path, "8xh100m80", max_dollars=20.0)
    found = rows(where, "8xh100m80", ranks=16, assume_tps=500_000)
    assert "at $47.84/h, the price of 2 x 8x H100 80 GiB" in found["cost"]
    assert "at $23.92/h, 0.42 h at $47.84/h (set price_per_hour to that)" in found["ceiling"]


# Estimated speeds. Tokens per second of eight GPUs, as --plan rounds them; the notebook measured 234,480 to 778,107.
ESTIMATED = {
    "8xa100m40": ("A100 40GB", 1_270_000),
    "8xa100m80": ("A100 80GB", 1_440_000),
    "8xh100m80": ("H100", 3_180_000),
    "8xb200m160": ("B200", 6_180_000),
}


@pytest.mark.parametrize("name", ESTIMATED)
def test_an_estimated_speed(tmp_path: Path, name: str) -> None:
    """Estimated speeds, times and costs are marked as estimates and have a range."""
    device, speed = ESTIMATED[name]
    found = rows(shipped(tmp_path, name), name, **EIGHT, assume_device=device)
    assert found["speed"].startswith(f"{speed:,} tokens/s of training alone, without validation (estimated for 8 x")
    low, high = (number(part) for part in found["speed"].partition(f"8 x {device}: ")[2].split(" to "))
    assert [low, high] == pytest.approx([0.8 * speed, 1.2 * speed], rel=0.005)
    total = dollars(found)[2]
    assert dollars(found)[-2:] == pytest.approx([total / 1.2, total / 0.8], abs=0.011)
    assert re.search(r"estimated: [\d.]+ (h|s) to [\d.]+ h in all", found["time"])
    assert total < BILLS[name][2] / 2, "the notebook's run must cost less than half with this program"


@pytest.mark.parametrize(("name", "speed"), [("8xa100m40", 984_000), ("8xh100m80", 2_740_000)])
def test_the_estimate_of_a_stack_of_levers_with_muon(tmp_path: Path, name: str, speed: int) -> None:
    """The estimated speed of GPT-2 small with Muon and FAST, the model options of a public speed record, is below the
    estimate without Muon and FAST, but above 60 % of it."""
    device, plain = ESTIMATED[name]
    where = shipped(tmp_path, name, optimizer="muon", lr_schedule="linear")
    model = where.runs / name / "model.json"
    model.write_text(json.dumps(json.loads(model.read_text()) | FAST))
    found = rows(where, name, **EIGHT, assume_device=device)
    assert found["speed"].startswith(f"{speed:,} tokens/s of training alone, without validation (estimated for 8 x")
    assert 0.6 * plain < speed < plain
    hours = number(found["tokens"]) / speed / 3600
    assert float(found["time"].split(" h training")[0]) == pytest.approx(hours, abs=0.006)
    price = float(found["cost"].split("at $")[1].split("/h")[0])
    assert dollars(found)[0] == pytest.approx(hours * price, abs=0.01)


# With this width even a small microbatch keeps a GPU busy for longer than the CPU needs to launch its kernels.
LARGE_ENOUGH = {"emb_dim": 4096, "n_layers": 1}


@pytest.mark.parametrize(("device", "said"), [("H100", "96 tokens/s"), ("H200", "(estimated for 1 x H200: ")])
def test_a_measured_speed_comes_first(shop: Workshop, device: str, said: str) -> None:
    """A speed measured on the device that the plan assumes replaces the estimate. A speed measured on another device
    does not."""
    shop.add_run(model=LARGE_ENOUGH)
    add_summary(shop, device="NVIDIA H100 80GB HBM3")
    assert said in rows(shop, assume_device=device, restart=True)["speed"]


@pytest.mark.parametrize("here", ["NVIDIA H100 80GB HBM3", "NVIDIA L40S"])
def test_a_speed_measured_here_comes_before_another_machines(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch, here: str
) -> None:
    """check_machine.py has measured this machine. The run was trained on another one."""
    run = shop.add_run(model=LARGE_ENOUGH)
    add_summary(shop, device=here, tokens_per_second=500.0)
    (run / "summary.json").rename(run / "machine-check.json")
    add_summary(shop, device="NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(planned_speed, "gpu_names", lambda: [here])
    assert rows(shop, restart=True)["speed"].startswith("500 tokens/s")


def test_a_speed_of_a_rehearsal_on_a_cpu_is_not_that_of_the_rented_machine(shop: Workshop) -> None:
    shop.add_run(price_per_hour=6.38)  # of 2 x H100
    add_summary(shop, world_size=2, device="x86_64 CPU")
    assert "CPU" not in rows(shop, ranks=2, restart=True).get("speed", "")


def test_what_has_no_estimate(shop: Workshop) -> None:
    shop.add_run(precision="fp32")
    found = rows(shop, assume_device="H100")
    said = 'unknown: no estimated speed for H100: the estimate does not cover "precision": "fp32"'
    assert found["time and cost"].startswith(said)
    assert "--assume-tps" in found["time and cost"]
    assert "speed" not in found


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (["NVIDIA H200", "NVIDIA H200"], "(estimated for 2 x H200: "),
        (["NVIDIA H200"], "batch and settings; give --assume-tps"),
        (["NVIDIA H200", "NVIDIA H100 80GB HBM3"], "no earlier run measured the speed"),
        (["NVIDIA L4", "NVIDIA L4"], "batch and settings; give --assume-tps"),
        ([], "batch and settings; give --assume-tps"),
    ],
    ids=str,
)
def test_this_machines_own_gpus(shop: Workshop, monkeypatch: pytest.MonkeyPatch, gpus: list[str], said: str) -> None:
    """The estimate is for this machine's GPUs if there is one for each rank, and they are alike."""
    shop.add_run(model=LARGE_ENOUGH)
    monkeypatch.setattr(planned_speed, "gpu_names", lambda: gpus)
    assert said in " ".join(rows(shop, ranks=2).values())
