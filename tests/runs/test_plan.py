"""--plan: its numbers against the notebook's figures and against brute force, and the runs that it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpt import GPTModel, ModelConfig
from harness.common.errors import UserError
from harness.model.config import load_model_config
from harness.planning import planned_speed
from harness.planning.plan import make_plan
from tests.runs.test_estimated_speed import FAST
from tests.runs.test_shipped_runs import MACHINES
from tests.support.isolation import SHIPPED_RUNS
from tests.support.launch import MODEL, Workshop, free_port
from tests.support.planning import add_summary, dollars, experiment_of, number, plan, rows, table

EIGHT: dict[str, Any] = {"assume_world_size": 8}


def shipped(folder: Path, name: str, **train: Any) -> Workshop:
    """Return a Workshop with a copy of a shipped run, with keys of train.json changed, and without datasets."""
    where = Workshop(folder)
    where.add_shipped_run(name, **train)
    return where


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# The notebook's runs


@pytest.mark.parametrize("name", MACHINES)
def test_the_notebooks_figures(tmp_path: Path, name: str) -> None:
    """Steps, tokens, time and cost of the notebook's runs at one step a second. A validation of 300 microbatches is
    divided among eight ranks, so each rank evaluates at most 38 of them."""
    microbatch, price, steps, tokens = MACHINES[name]
    where = shipped(tmp_path, name)
    found = rows(where, name, **EIGHT, assume_tps=8.0 * microbatch * 1024)
    assert (number(found["global steps"]), number(found["tokens"])) == (steps, tokens)
    assert f"8 ranks x {microbatch} sequences x 1 accumulation" in found["global batch"]
    assert f"= {8 * microbatch:,} sequences = {8 * microbatch * 1024:,} tokens" in found["global batch"]
    # Validations come at step 0, at every 617th step and at the last one.
    validations = sum(step % 617 == 0 or step == steps - 1 for step in range(steps))
    assert number(found["validations"]) == number(found["checkpoints"]) == validations
    assert "300 microbatches" in found["validations"]
    assert number(found["parameters"]) == load_model_config(SHIPPED_RUNS / name / "model.json").parameters
    said = re.match(r"([\d.]+) h training \+ ([\d.,]+) (h|s) validation", found["time"])
    assert said
    assert float(said[1]) == pytest.approx(steps / 3600, abs=0.005)
    validating = float(said[2]) * (3600 if said[3] == "h" else 1)
    assert validating == pytest.approx(validations * 38 / 3, abs=19 if said[3] == "h" else 0.6)
    assert dollars(found)[0] == pytest.approx(steps / 3600 * price, abs=0.005)


# The notebook's table: tokens per second of training with validation, whole seconds, dollars with and without
# validation.
BILLS = {
    "8xa100m40": (234_480, 13_904, 39.86, 35.56),
    "8xh100m80": (490_249, 6_650, 44.19, 38.13),
    "8xa100m80": (282_707, 11_532, 45.87, 39.57),
    "8xb200m160": (778_107, 4_190, 46.46, 39.14),
}


@pytest.mark.parametrize("is_reported", [False, True], ids=["assumed", "reported"])
@pytest.mark.parametrize("name", BILLS)
def test_the_notebooks_bills(tmp_path: Path, name: str, is_reported: bool) -> None:
    """A plan from the notebook's speeds has the notebook's cost, to the cent. These speeds include validation, which
    one GPU of the eight ran. Its part of the cost is the reported one, or an estimate if the speed is given as an
    option. The B200's cost may be off by a cent, because the table's seconds are cut to whole ones (0.4 cents)."""
    speed, seconds, total, without = BILLS[name]
    cents = 0.0101 if name == "8xb200m160" else 0.0001
    where = shipped(tmp_path, name, validation_ranks="rank0")
    found = rows(where, name, **EIGHT, assume_tps_with_validation=None if is_reported else speed)
    parts = dollars(found)
    assert parts[2] == pytest.approx(total, abs=cents)
    assert parts[2] == pytest.approx(parts[0] + parts[1], abs=1e-6), "the printed dollars do not add up"
    assert parts[0] == pytest.approx(without, abs=cents if is_reported else 1.40)
    source = f"reported of 8x {MACHINES_NAMED[name]}" if is_reported else "assumed)"
    assert found["speed"].startswith(f"{speed:,} tokens/s of training and validation together ({source}")
    told = "as reported" if is_reported else "estimated"
    hours = re.search(rf"validation \({told}\) = ([\d.]+) h, at ([\d,]+) tokens/s of training", found["time"])
    assert hours
    assert float(hours[1]) == pytest.approx(seconds / 3600, abs=0.006)
    if is_reported:
        assert "by Giles Thomas, " in found["speed"]
        assert "; not measured here; --assume-device " in found["speed"]
    else:  # the printed speed of training alone gives the same cost
        again = rows(where, name, **EIGHT, assume_tps=float(hours[2].replace(",", "")))
        assert dollars(again) == pytest.approx(parts, abs=0.011)


MACHINES_NAMED = dict(zip(BILLS, ("A100 40 GiB", "H100 80 GiB", "A100 80 GiB", "B200"), strict=True))


@pytest.mark.parametrize("name", BILLS)
def test_a_bill_with_validation_shared_out(tmp_path: Path, name: str) -> None:
    """The shipped runs, which validate on all ranks, cost the notebook's dollars without validation, and an estimate
    for validation."""
    found = rows(shipped(tmp_path, name), name, **EIGHT)
    assert "tokens/s of training alone, without validation (reported of 8x " in found["speed"]
    assert f"${BILLS[name][3]} training + $" in found["cost"]
    assert "validation (estimated)" in found["time"]


@pytest.mark.parametrize("name", ["quickstart", "test", "original"])
def test_the_other_shipped_runs_have_plans(tmp_path: Path, name: str) -> None:
    where = shipped(tmp_path, name)
    before = files(tmp_path)
    printed = plan(where, name)
    found = table(printed)
    assert number(found["global steps"]) > 0
    if name == "original":
        speed = "19,678 tokens/s of training alone, without validation (reported of 1x RTX 3090"
        assert found["speed"].startswith(speed)
        assert found["time"].startswith("46.02 h training"), "the notebook's progress bar showed 46 hours"
    else:
        assert "give --assume-tps" in found["time and cost"]
    assert all(key in printed for key in ("dataset=", "microbatch_size=", "emb_dim="))
    assert not any(key in printed for key in ("bucket_mb=", "random_seed")), "keys with default values are printed"
    assert (files(tmp_path), where.datasets.exists()) == (before, False), "a file was written or downloaded"


# Work and disk


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"validation_interval": 7},
        {"validation_interval": 1},
        {"validation_interval": 19},
        {"validation_interval": 1000},
        {"checkpoint_interval": 3},
        {"checkpoint_interval": 4, "keep_checkpoints": 1},
        {"validation_interval": None, "validation_batches": None, "start_val_token": None, "checkpoint_interval": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [1, 4])
def test_counts_agree_with_brute_force(shop: Workshop, train: dict[str, Any], ranks: int) -> None:
    shop.add_run(**train)
    found = rows(shop, ranks=ranks)
    steps, batch = 0, ranks * 2 * 2 * 16
    while steps * batch < 1280:
        steps += 1
    assert (number(found["global steps"]), number(found["tokens"])) == (steps, steps * batch)
    values = {"validation_interval": 5, "checkpoint_interval": None, **train}
    for row, every in (
        ("validations", values["validation_interval"]),
        ("checkpoints", values["checkpoint_interval"] or values["validation_interval"]),
    ):
        times = sum(step % every == 0 or step == steps - 1 for step in range(steps)) if every else 0
        assert number(found[row]) == times
    assert ("without validation" in found["validations"]) == (values["validation_interval"] is None)


def test_the_steps_of_training_on_all_tokens_need_the_dataset(shop: Workshop) -> None:
    shop.add_run(min_train_tokens=-1)
    assert number(rows(shop)["global steps"]) == (4000 - 1) // 64
    shutil.rmtree(shop.datasets)
    assert "unknown until local/letters" in rows(shop)["global steps"]
    assert not shop.datasets.exists()


def test_the_work_and_disk_of_a_run_that_has_begun(shop: Workshop) -> None:
    """Checkpoints of a trained run are as many and as large as planned. A plan for a run that has begun has only the
    remaining steps, and the speed of an earlier run of only four steps is not used."""
    wide: dict[str, Any] = {"model": {"emb_dim": 128}, "validation_interval": 2, "price_per_hour": 36.0}
    run = shop.add_run(**wide, min_train_tokens=256)
    planned = make_plan(experiment_of(shop), 1, None)
    assert shop.attempt().status == 0
    folders = [path for path in (run / "checkpoints").iterdir() if not path.is_symlink()]
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
    assert len(sizes) == planned.checkpoints() == 3
    # A checkpoint has the weights, the optimizer's moments, and other files, for which 1 MiB is planned.
    assert all(planned.checkpoint_bytes() - 2**20 < size < planned.checkpoint_bytes() for size in sizes)
    assert planned.disk_bytes() == 3 * planned.checkpoint_bytes()

    shop.add_run("again", **wide, min_train_tokens=2560)
    refusal = rows(shop, "again")["time and cost"]
    assert re.search(r"measured 4 steps, 256 tokens, [\d.]+ s, and less than 20 steps and 10 s ", refusal)

    found = rows(shop)
    assert found["done already"] == "4 steps, 256 tokens"
    assert found["global steps"].startswith("0 more")
    assert number(found["checkpoints"]) == 0
    assert rows(shop, assume_tps=100.0)["time"] == "0 s training + 0 s validation (estimated)"
    assert rows(shop, assume_tps_with_validation=100.0)["time"] == "0 s training + 0 s validation (estimated)"
    afresh = rows(shop, restart=True)
    assert "done already" not in afresh
    assert (number(afresh["global steps"]), number(afresh["checkpoints"])) == (4, 3)
    first = rows(shop, checkpoint=min(folders).name)
    assert first["done already"] == "1 steps, 64 tokens"
    assert first["global steps"].startswith("3 more")
    shop.add_run(**wide, min_train_tokens=640)
    found = rows(shop)
    assert found["global steps"].startswith("6 more")
    assert found["tokens"].startswith("384 more")
    assert number(found["checkpoints"]) == sum(step % 2 == 0 or step == 9 for step in range(4, 10))


def test_a_disk_too_small_is_refused(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shop.add_run(model={"emb_dim": 512}, checkpoint_interval=1)
    planned = make_plan(experiment_of(shop), 2, None)
    free = planned.disk_bytes()
    assert planned.checkpoints() == 10
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    planned.check_disk(run)
    free -= 1
    words = rf"^{re.escape(str(run))}: the run's 10 checkpoints need 0\.\d\d GiB.*keep_checkpoints"
    with pytest.raises(UserError, match=words):
        planned.check_disk(run)
    shop.add_run("kept", model={"emb_dim": 512}, checkpoint_interval=1, keep_checkpoints=2)
    smaller = make_plan(experiment_of(shop, "kept"), 2, None)
    assert smaller.disk_bytes() == 5 * planned.checkpoint_bytes()  # two kept, best, latest, and one being written


def test_a_plan_that_no_disk_can_hold_is_remarked_on(shop: Workshop) -> None:
    """A plan prints a note if the checkpoints do not fit on the disk. It does not fail, because torchrun would then
    print its own report on the failed ranks. Training refuses such a run."""
    shop.add_run(dataset="local/elsewhere", min_train_tokens=10**13, checkpoint_interval=1, price_per_hour=36.0)
    found = rows(shop, ranks=2, assume_tps=1e9)
    assert found["checkpoints"].startswith("78,125,000,000 (")
    assert found["cost"].startswith("$100.00 training")
    assert re.search(r"the run's 78,125,000,000 checkpoints need [\d,.]+ GiB, but [\d.]+ GiB are free", found["note"])
    assert "set keep_checkpoints in train.json" in found["note"]
    assert "note" not in rows(shop, assume_world_size=2), "this disk does not matter for another machine's plan"


def test_a_vocabulary_far_larger_than_the_datasets_is_remarked_on(shop: Workshop) -> None:
    """A plan prints a note if the model's vocabulary is far larger than the dataset's, but not for a padded vocabulary,
    and not if the run has begun, because the model can then no longer be changed."""
    meta = shop.datasets / "local" / "letters" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"vocab_size": 64}))
    shop.add_run(model={"vocab_size": 96}, min_train_tokens=64)
    assert "note" not in rows(shop)
    shop.add_run(model={"vocab_size": 640}, min_train_tokens=64)
    said = '"vocab_size" in model.json is 640, but local/letters has 64 tokens: 18,432 of 27,328 parameters are never'
    assert rows(shop)["note"] == f"{said} used; set it to 64"
    assert f"note: {said} used" in shop.attempt().stdout
    shop.add_run(model={"vocab_size": 640}, min_train_tokens=128)
    assert "note" not in rows(shop)


@pytest.mark.parametrize("has_dataset", [True, False])
def test_long_names_fit_a_terminal(tmp_path: Path, has_dataset: bool) -> None:
    name = "a-run-with-a-name-that-somebody-thought-about-for-longer-than-was-good"
    shop, dataset = Workshop(tmp_path), f"owner-of-datasets/{name}"
    if has_dataset:
        shop.add_dataset(dataset)
    shop.add_run(name, dataset=dataset, min_train_tokens=-1, sample_interval=5, sample_prompt="x" * 70)
    assert name in plan(shop, name, assume_tps=100.0)


# The command


def ranking(rank: int) -> dict[str, str]:
    """Return the environment variables that torchrun gives one of two ranks."""
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def test_under_torchrun_only_rank_0_prints(shop: Workshop) -> None:
    """With torchrun's environment variables only rank 0 prints the plan. Ranks exchange nothing for a plan, so the test
    runs one after the other."""
    shop.add_run()
    results = [shop.attempt("--plan", environment=ranking(rank)) for rank in range(2)]
    assert [(result.status, result.stderr) for result in results] == [(0, "")] * 2
    assert "2 ranks x 2 sequences x 2 accumulation" in table(results[0].stdout)["global batch"]
    assert results[1].stdout == ""


# Speeds that were measured


LONGER: dict[str, Any] = {
    "tokens_per_second": 64.0,
    "measured": {"global_steps": 300, "tokens": 19_200, "seconds": 300.0},
}
TOO_SHORT: dict[str, Any] = {"measured": {"global_steps": 3, "tokens": 192, "seconds": 1.0}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"world_size": 2}, "no earlier run of this shape; give --assume-tps"),
        ({"microbatch_size": 1}, "no earlier run of this shape"),
        ({"model": MODEL | {"n_layers": 3}}, "no earlier run of this shape"),
        ({"train": {"precision": "bf16"}}, "no earlier run of this shape"),
        ({"tokens_per_second": None}, "no earlier run of this shape"),
        ({"measured": {"global_steps": 19, "tokens": 1216, "seconds": 20.0}}, "and less than 20 steps of training is"),
        ({"measured": {"global_steps": 250, "tokens": 1920, "seconds": 2.8}}, "and less than 10 s of training is too"),
        ({"measured": {"global_steps": 19, "tokens": 192, "seconds": 9.9}}, "less than 20 steps and 10 s of training"),
        # An earlier version divided all tokens by its own seconds, also tokens that another program or machine trained.
        ({"measured": ...}, "early/summary.json is an earlier version's, and does not say what its speed was measured"),
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
    """A plan uses the speed in the run's own summary if it is usable, and else that of the longest earlier run of this
    shape."""
    shop.add_run("early")
    add_summary(shop, "early")
    shop.add_run(price_per_hour=36.0)
    found = rows(shop)
    assert found["speed"].startswith("96 tokens/s of training alone, without validation (measured over 30 steps, 1,920")
    assert "20.0 s of training on an abacus, in" in found["speed"]
    assert f"${1280 / 96 / 100:,.2f} training" in found["cost"]
    assert "time and cost" in rows(shop, assume_world_size=2)
    shop.add_run("later")
    add_summary(shop, "later", **LONGER)
    assert rows(shop)["speed"].startswith("64 tokens/s")
    add_summary(shop, tokens_per_second=80.0)
    assert rows(shop)["speed"].startswith("80 tokens/s")
    fewer = {key: value for key, value in experiment_of(shop).model.model_dump(mode="json").items() if key != "mlp"}
    add_summary(shop, tokens_per_second=72.0, model=fewer)
    assert rows(shop)["speed"].startswith("72 tokens/s"), "a summary of a version without a key must count"
    add_summary(shop, **TOO_SHORT)
    assert rows(shop)["speed"].startswith("64 tokens/s")


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\udcff", "null"])
def test_an_unreadable_summary_gives_no_speed(shop: Workshop, text: str) -> None:
    (shop.add_run("other") / "summary.json").write_text(text, errors="surrogateescape")
    shop.add_run()
    assert "no earlier run of this shape" in rows(shop)["time and cost"]


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
        ({}, {}, "(reported of"),  # the machine in the run's name has eight GPUs
        ({"assume_world_size": 4}, {}, "(estimated for 4 x A100 40GB"),
        (EIGHT, {"microbatch_size": 12}, "(estimated for 8 x A100 40GB"),
        (EIGHT, {"gradient_accumulation_steps": 2}, "(estimated for 8 x A100 40GB"),
        (EIGHT, {"precision": "fp16", "compile": False}, "(reported of"),
        (EIGHT | {"assume_tps": 1000.0}, {}, "(assumed)"),
        (EIGHT | {"assume_device": "A100 40GB"}, {}, "(estimated for"),
    ],
    ids=str,
)
def test_when_a_reported_speed_is_that_of_this_plan(
    tmp_path: Path, options: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    """A reported speed is used only for its own number of ranks, batch and device. --assume-tps replaces it."""
    assert said in rows(shipped(tmp_path, "8xa100m40", **changes), "8xa100m40", **options)["speed"]


@pytest.mark.parametrize(
    ("gpus", "said"),
    [(["NVIDIA H200"] * 8, "(estimated for 8 x H200"), (["NVIDIA A100-SXM4-40GB"] * 8, "(reported of 8x A100 40 GiB")],
)
def test_a_reported_speed_is_its_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[str], said: str
) -> None:
    monkeypatch.setattr(planned_speed, "gpu_names", lambda: gpus)
    assert said in rows(shipped(tmp_path, "8xa100m40"), "8xa100m40", ranks=8)["speed"]


def test_a_reported_speed_is_its_models(tmp_path: Path) -> None:
    """A reported speed is used only for the reported model, without activation checkpointing, and only if no speed was
    measured. An impossible model in reported.json is an error that names the key."""
    where = shipped(tmp_path, "8xa100m40", activation_checkpointing=True)
    run = where.runs / "8xa100m40"
    time_and_cost = rows(where, run.name, **EIGHT)["time and cost"]
    assert time_and_cost.startswith("unknown: no estimated speed for A100 40GB"), "the reported run had other kernels"
    shipped(tmp_path, run.name)
    add_summary(where, run.name, world_size=8, microbatch_size=13, accumulation_steps=1, tokens_per_second=500_000.0)
    speed = "500,000 tokens/s of training alone, without validation (measured over 30 steps"
    assert rows(where, run.name, **EIGHT)["speed"].startswith(speed)
    (run / "summary.json").unlink()
    model = (run / "model.json").read_text()
    (run / "model.json").write_text(model.replace('"n_layers": 12', '"n_layers": 6'))
    assert "reported" not in rows(where, run.name, **EIGHT)["speed"]
    (run / "model.json").write_text(model)
    (run / "reported.json").write_text((run / "reported.json").read_text().replace('"n_heads": 12', '"n_heads": 0'))
    with pytest.raises(UserError, match=r'reported.json: key "n_heads"'):
        plan(where, run.name, **EIGHT)


def test_a_run_is_planned_for_the_machine_that_it_is_named_after(tmp_path: Path) -> None:
    """On a computer without GPUs, a plan by one process is for all ranks of the machine in the run's name, or else of
    the machine whose price is in train.json."""
    where = shipped(tmp_path, "8xh100m80-fast")
    found = rows(where, "8xh100m80-fast")
    assert found["machine"].startswith("8x H100 80 GiB (by the run's name; ")
    assert found["global batch"].startswith("8 ranks x 27 sequences")
    assert "(estimated for 8 x H100: 2,230,000 to 3,350,000; " in found["speed"]
    assert "estimated: $6.61 to $9.91" in found["cost"]
    found = rows(where, "8xh100m80-fast", ranks=2)
    assert found["machine"].startswith("2 x H100 in place of 8x H100 80 GiB (by the run's name; ")
    assert "$6.38/h, the price of 2x H100 80 GiB on 2025-12-05" in found["cost"]
    mine = (where.runs / "8xh100m80-fast").rename(where.runs / "mine")
    assert rows(where, "mine")["machine"].startswith("8x H100 80 GiB (by price_per_hour; ")
    train = mine / "train.json"
    train.write_text(train.read_text().replace("23.92", "24"))
    found = rows(where, "mine")
    assert "machine" not in found
    assert found["global batch"].startswith("1 ranks x 27 sequences")


@pytest.mark.parametrize(
    ("price", "device", "said"),
    [
        (23.92, "H100", "at $23.92/h, the price of 8x H100 80 GiB"),
        (23.92, "A100 80GB", "at $14.32/h, the price of 8x A100 80 GiB on 2025-12-05"),
        (23.92, "H200", "unknown: train.json's $23.92/h is the price of 8x H100 80 GiB, not of 8 x H200"),
        (30.0, "H200", "at $30.0/h, by train.json"),
    ],
)
def test_dollars_are_not_those_of_another_machine(tmp_path: Path, price: float, device: str, said: str) -> None:
    where = shipped(tmp_path, "8xh100m80", price_per_hour=price)
    assert said in rows(where, "8xh100m80", assume_device=device)["cost"]


# Benchmarks, and initial weights

BENCHMARKS: dict[str, Any] = {
    "benchmark_interval": 4,
    "benchmark_tasks": ["piqa", "arc_easy"],
    "benchmark_examples": 50,
    "price_per_hour": 36.0,
}
EARLIER: dict[str, Any] = {"global_steps": 9, "seconds": {"training": 20.0, "benchmarks": 30.0, "total": 50.0}}
COUNTED = "6 (piqa, arc_easy; 50 examples each)"  # after steps 0, 4, 8, 12, 16 and the last


@pytest.mark.parametrize(
    "values",
    [
        None,
        {"train": BENCHMARKS | {"benchmark_examples": 51}},
        {"seconds": {"training": 20.0}},
        {"world_size": 2},
        {"global_steps": None},
    ],
    ids=str,
)
def test_benchmarks_whose_time_is_not_known(shop: Workshop, values: dict[str, Any] | None) -> None:
    shop.add_run(**BENCHMARKS)
    if values is not None:
        add_summary(shop, **EARLIER | values)
    found = rows(shop, assume_tps=64.0)
    assert found["benchmarks"] == f"{COUNTED} how long they take is not known, and not counted"
    assert "benchmarks" not in found["time"] + found["cost"]
    assert list(found).index("benchmarks") == list(found).index("validations") + 1


@pytest.mark.parametrize("options", [{}, {"assume_tps": 96.0}, {"assume_tps_with_validation": 96.0}], ids=str)
def test_benchmarks_take_as_long_as_this_runs_earlier_ones(shop: Workshop, options: dict[str, Any]) -> None:
    """The time of benchmarks comes from the run's own summary: three evaluations in 9 steps took 30 s, so six take 60
    s."""
    shop.add_run(**BENCHMARKS)
    add_summary(shop, **EARLIER)
    found = rows(shop, **options)
    assert found["benchmarks"] == COUNTED
    assert "+ 60 s benchmarks, as this run's earlier ones" in found["time"]
    assert " + $0.60 benchmarks = $" in found["cost"]
    assert dollars(found)[3] == pytest.approx(sum(dollars(found)[:3]), abs=0.011)


def test_a_plan_names_and_checks_the_weights_to_start_from(shop: Workshop) -> None:
    """A plan checks the initial weights as training does at its start. A run that resumes from a checkpoint does not
    need them."""
    weights = shop.add_run(initial_weights="start.safetensors", min_train_tokens=64) / "start.safetensors"

    def write(**shape: int) -> None:
        torch.manual_seed(0)
        model = GPTModel(ModelConfig(**MODEL | shape))
        save_file({name: each.contiguous() for name, each in model.to_checkpoint_names().items()}, weights)

    with pytest.raises(UserError, match=re.escape(f"{weights}: no such file")):
        plan(shop)
    weights.write_bytes(b"not one")
    with pytest.raises(UserError, match=re.escape(f"{weights}: not a readable safetensors file")):
        plan(shop)
    write(emb_dim=32)
    words = "not this model: tensor tok_emb.weight is [64, 32] in the file, [64, 16] in model.json"
    with pytest.raises(UserError, match=re.escape(words)) as refused:
        plan(shop)
    assert shop.attempt().error_lines == [f"error: {refused.value}"]
    write()
    assert rows(shop)["starts from"].replace(" ", "") == str(weights)
    assert shop.attempt().status == 0
    weights.unlink()
    assert "starts from" not in rows(shop)
    with pytest.raises(UserError, match="no such file"):
        plan(shop, restart=True)


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
    """The estimate for GPT-2 small with Muon and the model options of the public speed record is below the same run's
    without them."""
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
    """A speed measured on the assumed device replaces the estimate. A speed measured on another device does not."""
    shop.add_run(model=LARGE_ENOUGH)
    add_summary(shop, device="NVIDIA H100 80GB HBM3")
    assert said in rows(shop, assume_device=device)["speed"]


@pytest.mark.parametrize(
    ("train", "options", "said"),
    [
        ({"precision": "fp32"}, {}, 'unknown: no estimated speed for H100: "precision": "fp32" is not covered'),
        ({}, {"assume_world_size": 16}, "unknown: no estimated speed for H100: 16 ranks are more than one machine"),
        # The GPU would wait for the CPU most of the time, and that time cannot be estimated.
        ({}, {}, "unknown: no estimated speed for H100: launching the kernels"),
    ],
)
def test_what_has_no_estimate(shop: Workshop, train: dict[str, Any], options: dict[str, Any], said: str) -> None:
    shop.add_run(**train)
    found = rows(shop, assume_device="H100", **options)
    assert found["time and cost"].startswith(said)
    assert "--assume-tps" in found["time and cost"]
    assert "speed" not in found


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (["NVIDIA H200", "NVIDIA H200"], "(estimated for 2 x H200: "),
        (["NVIDIA H200"], "no earlier run of this shape; give --assume-tps"),
        (["NVIDIA H200", "NVIDIA H100 80GB HBM3"], "no earlier run of this shape; give --assume-tps"),
        (["NVIDIA L4", "NVIDIA L4"], "no earlier run of this shape; give --assume-tps"),
        ([], "no earlier run of this shape; give --assume-tps"),
    ],
    ids=str,
)
def test_this_machines_own_gpus(shop: Workshop, monkeypatch: pytest.MonkeyPatch, gpus: list[str], said: str) -> None:
    """The estimate is for this machine's GPUs if there is one for each rank, and they are alike."""
    shop.add_run(model=LARGE_ENOUGH)
    monkeypatch.setattr(planned_speed, "gpu_names", lambda: gpus)
    assert said in " ".join(rows(shop, ranks=2).values())
