"""--plan: the arithmetic of a run against the notebook's figures and against brute force, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.common.options import TrainOptions
from harness.model.config import load_model_config
from harness.planning import planned_speed
from harness.planning.experiment import Experiment
from harness.planning.plan import make_plan
from harness.planning.planned_speed import plan_speed
from harness.runs.directory import RunDirectory
from tests.runs.test_estimated_speed import FAST
from tests.runs.test_shipped_runs import MACHINES
from tests.support.isolation import SHIPPED_RUNS
from tests.support.launch import Result, Workshop, free_port

COLUMNS = 80


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_dataset()
    return made


def rows(result: Result) -> dict[str, str]:
    """The plan's table: label → text, wrapped lines joined."""
    assert result.status == 0, result.stderr
    assert result.stderr == ""
    found: dict[str, str] = {}
    label = ""
    for line in result.stdout[result.stdout.index("\nparameters ") :].splitlines()[1:]:
        match = re.fullmatch(r"(\S.*?)?  +(\S.*)", line)
        assert match, line
        label = match[1] or label
        found[label] = f"{found[label]} {match[2]}" if label in found else match[2]
    return found


def narrow(result: Result) -> None:
    """Assert that the output can be read in a terminal of 80 columns."""
    assert result.status == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if len(line) > COLUMNS] == []


def number(text: str) -> int:
    match = re.match(r"[\d,]+", text)
    assert match, text
    return int(match[0].replace(",", ""))


def state(folder: Path) -> dict[str, tuple[int, str]]:
    """Return each file of a folder with its time of change in ns and its SHA-256."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
    }


def plan_shipped(tmp_path: Path, name: str, *arguments: str, **changes: Any) -> Result:
    """The plan of a copy of a shipped run."""
    where = Workshop(tmp_path)
    where.add_shipped_run(name, **changes)
    before = state(where.path)
    result = where.attempt("--plan", *arguments, run=name)
    assert state(where.path) == before
    return result


@pytest.mark.parametrize("name", MACHINES)
def test_the_notebooks_figures(tmp_path: Path, name: str) -> None:
    microbatch, price, steps, tokens = MACHINES[name]
    found = rows(plan_shipped(tmp_path, name, "--assume-world-size", "8", "--assume-tps", "234480"))
    assert number(found["global steps"]) == steps
    assert number(found["tokens"]) == tokens
    assert f"8 ranks x {microbatch} sequences x 1 accumulation" in found["global batch"]
    assert f"= {8 * microbatch:,} sequences = {8 * microbatch * 1024:,} tokens" in found["global batch"]
    # Step 0, every 617th, and the last one: counted one by one.
    validations = sum(step % 617 == 0 or step == steps - 1 for step in range(steps))
    assert number(found["validations"]) == number(found["checkpoints"]) == validations
    assert "300 microbatches" in found["validations"]
    parameters = load_model_config(SHIPPED_RUNS / name / "model.json").parameters
    assert number(found["parameters"]) == parameters
    dollars = re.search(r"\$([\d,.]+) training", found["cost"])
    hours = re.search(r"([\d,.]+) h training", found["time"])
    assert dollars
    assert hours
    assert float(hours[1]) == pytest.approx(tokens / 234480 / 3600, abs=0.005)
    assert float(dollars[1]) == pytest.approx(tokens / 234480 / 3600 * price, abs=0.005)
    assert not (tmp_path / "datasets").exists(), "nothing is downloaded, no folder made"


# Tokens per second with validation, whole seconds, dollars with and without validation: the notebook's table.
BILLS = {
    "8xa100m40": (234_480, 13_904, 39.86, 35.56),
    "8xh100m80": (490_249, 6_650, 44.19, 38.13),
    "8xa100m80": (282_707, 11_532, 45.87, 39.57),
    "8xb200m160": (778_107, 4_190, 46.46, 39.14),
}


@pytest.mark.parametrize("name", BILLS)
def test_the_notebooks_bills(tmp_path: Path, name: str) -> None:
    """Its speeds are those of its whole bill: what is planned from them is that bill, to the cent; validation is a part
    of it, and not added to it. (B200: the table's seconds are cut to whole ones, which is 0.4 cents.) One GPU of the
    eight validated there."""
    speed, seconds, dollars, without = BILLS[name]
    arguments = ("--assume-world-size", "8", "--assume-tps-with-validation", str(speed))
    found = rows(plan_shipped(tmp_path, name, *arguments, validation_ranks="rank0"))
    parts = [float(part) for part in re.findall(r"\$([\d.]+)", found["cost"])]
    assert parts[2] == pytest.approx(dollars, abs=0.0101 if name == "8xb200m160" else 0.0001)
    assert parts[2] == pytest.approx(parts[0] + parts[1], abs=1e-6)
    assert parts[0] == pytest.approx(without, abs=1.40), "validation's share is an estimate"
    assert f"{speed:,} tokens/s of training and validation together (assumed)" in found["speed"]
    hours = re.search(r"= ([\d.]+) h", found["time"])
    assert hours
    assert float(hours[1]) == pytest.approx(seconds / 3600, abs=0.006)
    # Its speed of training alone gives the same plan.
    alone = re.search(r"at ([\d,]+) tokens/s of training", found["time"])
    assert alone
    arguments = (*arguments[:2], "--assume-tps", alone[1].replace(",", ""))
    found = rows(plan_shipped(tmp_path, name, *arguments, validation_ranks="rank0"))
    again = [float(part) for part in re.findall(r"\$([\d.]+)", found["cost"])]
    assert again == pytest.approx(parts[:3] + parts[3:], abs=0.011)


@pytest.mark.parametrize("name", BILLS)
def test_the_bills_from_the_reported_figures(tmp_path: Path, name: str) -> None:
    """Nothing measured, nothing assumed: as the notebook validated, its whole bill, validation's part of it as it says;
    as the runs ship, its bill without validation, and what shared validation adds. (B200: cut seconds, again.)"""
    speed, seconds, dollars, without = BILLS[name]
    cents = 0.0101 if name == "8xb200m160" else 0.0001
    found = rows(plan_shipped(tmp_path, name, "--assume-world-size", "8", validation_ranks="rank0"))
    parts = [float(part) for part in re.findall(r"\$([\d.]+)", found["cost"])]
    assert parts[2] == pytest.approx(dollars, abs=cents)
    assert parts[0] == pytest.approx(without, abs=cents)
    assert parts[1] == pytest.approx(dollars - without, abs=0.0001)
    assert parts[2] == pytest.approx(parts[0] + parts[1], abs=1e-6), "what is printed adds up"
    assert found["speed"].startswith(f"{speed:,} tokens/s of training and validation together (reported of 8x ")
    assert "by Giles Thomas, " in found["speed"]
    assert "; not measured here; --assume-device " in found["speed"]
    hours = re.search(r"validation \(as reported\) = ([\d.]+) h", found["time"])
    assert hours
    assert float(hours[1]) == pytest.approx(seconds / 3600, abs=0.006)

    result = plan_shipped(tmp_path, name, "--assume-world-size", "8")
    narrow(result)
    found = rows(result)
    assert "tokens/s of training alone, without validation (reported of 8x " in found["speed"]
    assert f"${without} training + $" in found["cost"]
    assert "validation (estimated)" in found["time"]


def test_when_a_reported_speed_is_none_of_this_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of ranks, batches, models or kernels; other devices in this machine, or in the question."""
    name, eight = "8xa100m40", ("--assume-world-size", "8")
    assert "(reported of" in rows(plan_shipped(tmp_path, name))["speed"], "the machine that it is named after has eight"
    assert "(estimated for 4 x A100 40GB" in rows(plan_shipped(tmp_path, name, "--assume-world-size", "4"))["speed"]
    for changes in ({"microbatch_size": 12}, {"gradient_accumulation_steps": 2}):
        found = rows(plan_shipped(tmp_path, name, *eight, **changes))
        assert "(estimated for 8 x A100 40GB" in found["speed"], changes
    found = rows(plan_shipped(tmp_path, name, *eight, activation_checkpointing=True))
    assert found["time and cost"].startswith("unknown: no estimated speed for A100 40GB")
    assert "(reported of" in rows(plan_shipped(tmp_path, name, *eight, precision="fp16", compile=False))["speed"]
    for option in (("--assume-tps", "1000"), ("--assume-device", "A100 40GB")):
        assert "reported" not in rows(plan_shipped(tmp_path, name, *eight, *option))["speed"]

    def options(**given: Any) -> TrainOptions:
        values = dict.fromkeys((field.name for field in fields(TrainOptions)), None)
        return TrainOptions(**{**values, **given})

    here = ["NVIDIA H200"] * 8
    monkeypatch.setattr(planned_speed, "gpu_names", lambda: here)
    experiment = Experiment.load(RunDirectory.find(tmp_path / "runs", name), tmp_path)
    layout = experiment.layout(8)
    assert plan_speed(experiment, layout, options()).source.startswith("estimated for 8 x H200")
    here = ["NVIDIA A100-SXM4-40GB"] * 8
    assert plan_speed(experiment, layout, options()).source.startswith("reported of 8x A100 40 GiB")
    model = experiment.run.model_json
    model.write_text(model.read_text().replace('"n_layers": 12', '"n_layers": 6'))
    here = []
    experiment = Experiment.load(experiment.run, tmp_path)
    assert plan_speed(experiment, layout, options()).tokens_per_second is None


def test_what_was_measured_goes_before_what_is_reported(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    run = shop.add_shipped_run("8xa100m40")
    experiment = Experiment.load(RunDirectory(run), shop.datasets)
    add_summary(run, experiment, world_size=8, microbatch_size=13, accumulation_steps=1, tokens_per_second=500_000.0)
    found = rows(shop.attempt("--plan", "--assume-world-size", "8", run="8xa100m40"))
    assert found["speed"].startswith("500,000 tokens/s of training alone, without validation (measured over 30 steps")


def test_a_reported_model_that_is_none_is_named(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    run = shop.add_shipped_run("8xa100m40")
    reported = (run / "reported.json").read_text().replace('"n_heads": 12', '"n_heads": 0')
    (run / "reported.json").write_text(reported)
    result = shop.attempt("--plan", "--assume-world-size", "8", run="8xa100m40")
    assert result.status == 2
    assert 'reported.json: key "n_heads"' in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", BILLS)
def test_validation_that_is_shared_out_costs_an_eighth(tmp_path: Path, name: str) -> None:
    """A rank of a shipped run has at most 38 of 300 microbatches, and the others do not wait for all 300."""
    microbatch, _, steps, _ = MACHINES[name]
    speed = 8 * microbatch * 1024  # a step a second
    found = rows(plan_shipped(tmp_path, name, "--assume-world-size", "8", "--assume-tps", str(speed)))
    validations = sum(step % 617 == 0 or step == steps - 1 for step in range(steps))
    said = re.search(r"\+ ([\d.,]+) (h|s) validation", found["time"])
    assert said
    seconds = number(said[1]) if said[2] == "s" else float(said[1]) * 3600
    assert seconds == pytest.approx(validations * 38 / 3, abs=19 if said[2] == "h" else 0.6)


def test_without_validation_both_speeds_are_one(shop: Workshop) -> None:
    shop.add_run(
        validation_interval=None,
        validation_batches=None,
        start_val_token=None,
        checkpoint_interval=6,
        price_per_hour=3600.0,
    )
    for option in ("--assume-tps", "--assume-tps-with-validation"):
        assert "$128.00 training + $0.00 validation" in rows(shop.attempt("--plan", option, "10"))["cost"]


@pytest.mark.parametrize("name", ["quickstart", "test", "original"])
def test_the_other_shipped_runs_have_plans(tmp_path: Path, name: str) -> None:
    result = plan_shipped(tmp_path, name)
    found = rows(result)
    assert number(found["global steps"]) > 0
    if name == "original":
        assert found["speed"].startswith(
            "19,678 tokens/s of training alone, without validation (reported of 1x RTX 3090"
        )
        assert found["time"].startswith("46.02 h training"), "as its progress bar said"
    else:
        assert "give --assume-tps" in found["time and cost"]
    assert not (tmp_path / "datasets").exists()
    assert all(key in result.stdout for key in ("dataset=", "microbatch_size=", "emb_dim="))
    assert "bucket_mb=" not in result.stdout, "keys that have their defaults are not printed"
    assert "random_seed" not in result.stdout


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
    before = state(shop.runs)
    found = rows(shop.attempt("--plan", "--assume-world-size", str(ranks)))
    steps, batch = 0, ranks * 2 * 2 * 16
    while steps * batch < 1280:
        steps += 1
    assert number(found["global steps"]) == steps
    assert number(found["tokens"]) == steps * batch
    values = {"validation_interval": 5, "checkpoint_interval": None, **train}
    every = values["validation_interval"]
    validations = sum(step % every == 0 or step == steps - 1 for step in range(steps)) if every else 0
    every = values["checkpoint_interval"] or every
    checkpoints = sum(step % every == 0 or step == steps - 1 for step in range(steps))
    assert number(found["validations"]) == validations
    assert number(found["checkpoints"]) == checkpoints
    if not validations:
        assert "without validation" in found["validations"]
    assert state(shop.runs) == before


def test_all_there_is_needs_the_dataset(shop: Workshop) -> None:
    shop.add_run(min_train_tokens=-1)
    assert number(rows(shop.attempt("--plan"))["global steps"]) == (4000 - 1) // 64
    shutil.rmtree(shop.datasets)
    assert "unknown until local/letters" in rows(shop.attempt("--plan"))["global steps"]
    assert not shop.datasets.exists()


@pytest.mark.slow
def test_the_disk_of_real_checkpoints(tmp_path: Path) -> None:
    """A run of a few MB of weights, planned, then trained: what lies in checkpoints/ is what was planned. What is done
    already is not planned again, and a speed of four steps is not believed."""
    shop = Workshop(tmp_path)
    shop.add_dataset()
    wide = {"emb_dim": 512, "n_layers": 4, "n_heads": 8}
    run = shop.add_run(model=wide, min_train_tokens=256, validation_interval=2, price_per_hour=36.0)
    experiment = Experiment.load(RunDirectory.find(shop.runs, "r"), shop.datasets)
    plan = make_plan(experiment, 1, None)
    assert "no earlier run of this shape; give --assume-tps" in rows(shop.attempt("--plan"))["time and cost"]
    assert shop.attempt().status == 0
    folders = [path for path in (run / "checkpoints").iterdir() if not path.is_symlink()]
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
    assert len(sizes) == plan.checkpoints() == 3
    assert sizes == [pytest.approx(plan.checkpoint_bytes(), rel=0.02)] * 3
    assert sum(sizes) == pytest.approx(plan.disk_bytes(), rel=0.02)

    shop.add_run("again", model=wide, min_train_tokens=2560)
    refusal = rows(shop.attempt("--plan", run="again"))["time and cost"]
    assert re.search(r"measured 4 steps, 256 tokens, [\d.]+ s, and less than 20 steps ", refusal)
    assert "less than 20 steps and 10 s of training is too little to tell; give --assume-tps" in refusal

    found = rows(shop.attempt("--plan"))
    assert found["done already"] == "4 steps, 256 tokens"
    assert found["global steps"].startswith("0 more")
    assert number(found["checkpoints"]) == 0
    for option in ("--assume-tps", "--assume-tps-with-validation"):
        assert rows(shop.attempt("--plan", option, "100"))["time"] == "0 s training + 0 s validation (estimated)"
    afresh = rows(shop.attempt("--plan", "--restart"))
    assert "done already" not in afresh
    assert (number(afresh["global steps"]), number(afresh["checkpoints"])) == (4, 3)
    first = rows(shop.attempt(min(folders).name, "--plan"))
    assert first["done already"] == "1 steps, 64 tokens"
    assert first["global steps"].startswith("3 more")
    shop.add_run(model=wide, min_train_tokens=640, validation_interval=2, price_per_hour=36.0)
    found = rows(shop.attempt("--plan"))
    assert found["global steps"].startswith("6 more")
    assert found["tokens"].startswith("384 more")
    assert number(found["checkpoints"]) == sum(step % 2 == 0 or step == 9 for step in range(4, 10))


def add_summary(run: Path, experiment: Experiment, **values: Any) -> None:
    """Write the summary of a run of 30 steps in 20 s, but for these values."""
    summary = {"model": experiment.model.model_dump(mode="json"), "world_size": 1, "microbatch_size": 2}
    summary |= {"train": experiment.config.model_dump(mode="json"), "accumulation_steps": 2, "device": "an abacus"}
    summary |= {"tokens_per_second": 96.0, "measured": {"global_steps": 30, "tokens": 1920, "seconds": 20.0}}
    (run / "summary.json").write_text(json.dumps(summary | values))


def test_the_speed_of_an_earlier_run(shop: Workshop) -> None:
    """An earlier run counts if model, batch and arithmetic agree and it was long enough; this run's own comes first."""
    experiment = Experiment.load(RunDirectory(shop.add_run("early")), shop.datasets)
    early = shop.runs / "early"
    shop.add_run(price_per_hour=36.0)
    for values in (
        {"world_size": 2},
        {"microbatch_size": 1},
        {"model": experiment.model.model_dump(mode="json") | {"n_layers": 3}},
        {"train": experiment.config.model_dump(mode="json") | {"precision": "bf16"}},
        {"tokens_per_second": None},
        {"measured": {"global_steps": 19, "tokens": 1216, "seconds": 20.0}},
        {"measured": {"global_steps": 30, "tokens": 1920, "seconds": 9.9}},
        {"measured": None},
    ):
        add_summary(early, experiment, **values)
        assert "time and cost" in rows(shop.attempt("--plan")), values
    add_summary(early, experiment)
    found = rows(shop.attempt("--plan"))
    assert found["speed"].startswith("96 tokens/s of training alone, without validation (measured over 30 steps, 1,920")
    assert "20.0 s of training on an abacus, in" in found["speed"]
    assert f"${1280 / 96 / 100:,.2f} training" in found["cost"]
    assert "time and cost" in rows(shop.attempt("--plan", "--assume-world-size", "2"))
    longer = {"global_steps": 300, "tokens": 19_200, "seconds": 300.0}
    add_summary(shop.add_run("later"), experiment, tokens_per_second=64.0, measured=longer)
    assert rows(shop.attempt("--plan"))["speed"].startswith("64 tokens/s")
    add_summary(shop.runs / "r", experiment, tokens_per_second=80.0)
    assert rows(shop.attempt("--plan"))["speed"].startswith("80 tokens/s")
    fewer = {key: value for key, value in experiment.model.model_dump(mode="json").items() if key != "logit_softcap"}
    add_summary(shop.runs / "r", experiment, tokens_per_second=72.0, model=fewer)
    assert rows(shop.attempt("--plan"))["speed"].startswith("72 tokens/s"), "by a version that had fewer keys"
    # One too short to be believed does not stand in the way of others.
    add_summary(shop.runs / "r", experiment, measured={"global_steps": 3, "tokens": 192, "seconds": 1.0})
    assert rows(shop.attempt("--plan"))["speed"].startswith("64 tokens/s")
    assert shop.runs.joinpath("r", "summary.json").exists()


def test_a_short_measurement_names_the_limit_it_missed(shop: Workshop) -> None:
    experiment = Experiment.load(RunDirectory(shop.add_run()), shop.datasets)
    for steps, seconds, missed in ((250, 2.8, "10 s"), (19, 100.0, "20 steps"), (19, 9.9, "20 steps and 10 s")):
        measured = {"global_steps": steps, "tokens": 1920, "seconds": seconds}
        add_summary(shop.runs / "r", experiment, measured=measured)
        assert f"and less than {missed} of training is too little" in rows(shop.attempt("--plan"))["time and cost"]


def test_the_speed_in_a_summary_of_an_earlier_version_is_not_believed(shop: Workshop) -> None:
    """It divided all tokens by its own seconds, also those that another program or machine had trained."""
    experiment = Experiment.load(RunDirectory(shop.add_run()), shop.datasets)
    add_summary(shop.runs / "r", experiment, global_steps=30, tokens_seen=1920, seconds={"training": 20.0})
    summary = json.loads((shop.runs / "r" / "summary.json").read_text())
    del summary["measured"]
    (shop.runs / "r" / "summary.json").write_text(json.dumps(summary))
    refusal = rows(shop.attempt("--plan"))["time and cost"]
    assert "r/summary.json is an earlier version's, and does not say what its speed was measured over" in refusal
    assert "give --assume-tps" in refusal
    # It does not stand in the way of one that says it.
    add_summary(shop.add_run("later"), experiment)
    assert rows(shop.attempt("--plan"))["speed"].startswith("96 tokens/s")


@pytest.mark.parametrize(("tps", "price"), [(1280, 3600.0), (2.5, 7.2), (1e6, 0.0)])
def test_dollars_are_hours_times_the_price(shop: Workshop, tps: float, price: float) -> None:
    shop.add_run(price_per_hour=price)
    found = rows(shop.attempt("--plan", "--assume-tps", str(tps)))
    hours = 1280 / tps / 3600
    assert found["speed"] == f"{tps:,.0f} tokens/s of training alone, without validation (assumed)"
    assert f"${hours * price:,.2f} training" in found["cost"]
    expected = f"{hours:,.2f} h" if hours * 3600 >= 600 else f"{hours * 3600:,.0f} s"
    assert found["time"].startswith(f"{expected} training")


def test_no_price_no_dollars(shop: Workshop) -> None:
    shop.add_run()
    assert "no price_per_hour" in rows(shop.attempt("--plan", "--assume-tps", "10"))["cost"]


def test_a_summary_that_is_none_is_no_speed(shop: Workshop) -> None:
    for name, text in (("a", "{"), ("b", "[]"), ("c", "{}"), ("d", "\udcff"), ("e", "null")):
        (shop.add_run(name) / "summary.json").write_text(text, errors="surrogateescape")
    shop.add_run()
    assert "time and cost" in rows(shop.attempt("--plan"))


@pytest.mark.parametrize(
    ("model", "train", "words"),
    [
        ({}, {"min_train_tokens": 4000}, ["train split of local/letters is too short", "4,033", "4,000"]),
        ({}, {"warmup_steps": 100}, ["warmup_steps", "100 steps", "20 global steps"]),
        ({"vocab_size": 60}, {}, ["train.safetensors", "token id 63", "vocabulary of 60"]),
        ({}, {"validation_batches": 1000}, ["validation split", "too short", "32,001", "500"]),
    ],
    ids=["short", "warm-up", "vocabulary", "validation"],
)
def test_what_cannot_work_is_refused(
    shop: Workshop, model: dict[str, Any], train: dict[str, Any], words: list[str]
) -> None:
    shop.add_run(model=model, **train)
    result = shop.attempt("--plan", "--assume-tps", "100")
    assert (result.status, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words), lines[0]


def test_a_disk_too_small_is_refused(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shop.add_run(model={"emb_dim": 512}, checkpoint_interval=1)
    experiment = Experiment.load(RunDirectory(run), shop.datasets)
    plan = make_plan(experiment, 2, None)
    free = plan.disk_bytes()
    assert plan.checkpoints() == 10
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    plan.check_disk(run)
    free -= 1
    with pytest.raises(UserError, match=r"the run's 10 checkpoints need 0\.\d\d GiB.*keep_checkpoints") as caught:
        plan.check_disk(run)
    assert str(run) in str(caught.value)
    assert "\n" not in str(caught.value)
    kept = shop.add_run("kept", model={"emb_dim": 512}, checkpoint_interval=1, keep_checkpoints=2)
    smaller = Experiment.load(RunDirectory(kept), shop.datasets)
    assert (
        make_plan(smaller, 2, None).disk_bytes() == 5 * plan.checkpoint_bytes()
    )  # best, latest, and one in the making


def test_a_plan_that_no_disk_can_hold_is_remarked_on(shop: Workshop) -> None:
    """A rank that fails would have torchrun print its page over the plan; training refuses."""
    shop.add_run(dataset="local/elsewhere", min_train_tokens=10**13, checkpoint_interval=1, price_per_hour=36.0)
    found = rows(shop.attempt("--plan", "--assume-tps", "1e9", environment=ranking(0)))
    assert found["checkpoints"].startswith("78,125,000,000 (")
    assert found["cost"].startswith("$100.00 training")
    assert re.search(r"the run's 78,125,000,000 checkpoints need [\d,.]+ GiB, but [\d.]+ GiB are free", found["note"])
    assert "set keep_checkpoints in train.json" in found["note"]
    assert "note" not in rows(shop.attempt("--plan", "--assume-world-size", "2")), "another machine's disk"


def ranking(rank: int) -> dict[str, str]:
    """The environment of one of two ranks, as torchrun makes it."""
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def test_under_torchrun_one_rank_speaks(shop: Workshop) -> None:
    """Each rank as torchrun starts it; a plan needs no word from the others, so one after another does as well."""
    shop.add_run()
    results = [shop.attempt("--plan", environment=ranking(rank)) for rank in range(2)]
    assert [result.status for result in results] == [0, 0]
    assert "2 ranks x 2 sequences x 2 accumulation" in rows(results[0])["global batch"]
    assert results[1].stdout == results[1].stderr == ""


@pytest.mark.slow
def test_under_the_real_torchrun(shop: Workshop) -> None:
    shop.add_run()
    result = shop.torchrun("r", "--plan")
    assert result.stdout.count("Plan for r") == 1
    assert number(rows(Result(0, result.stdout, ""))["global steps"]) == 10


def test_plans_fit_a_terminal(tmp_path: Path) -> None:
    """Lines fit for the largest machine, without the dataset, and with a speed measured on a named device."""
    shop = Workshop(tmp_path)
    for name in ("8xb200m160", "quickstart"):
        narrow(plan_shipped(tmp_path, name, "--assume-world-size", "8", "--assume-tps", "778107"))
    run = shop.add_run(min_train_tokens=-1)
    narrow(shop.attempt("--plan"))
    shop.add_dataset()
    experiment = Experiment.load(RunDirectory(run), shop.datasets)
    measured = {"global_steps": 30_614, "tokens": 3_260_268_544, "seconds": 13_904.0}
    add_summary(run, experiment, tokens_per_second=778_107.5, device="NVIDIA A100-SXM4-40GB", measured=measured)
    # A path as users have it: relative, from the repository root.
    result = shop.command("ddp_train.py", "r", "datasets", "--plan")
    assert "13,904.0 s of training on NVIDIA A100-SXM4-40GB, in runs/r/summary.json)" in rows(result)["speed"]
    narrow(result)


def test_long_names_fit_a_terminal(tmp_path: Path) -> None:
    name = "a-run-with-a-name-that-somebody-thought-about-for-longer-than-was-good"
    shop = Workshop(tmp_path)
    shop.add_dataset(f"owner-of-datasets/{name}")
    shop.add_run(
        name, dataset=f"owner-of-datasets/{name}", min_train_tokens=-1, sample_interval=5, sample_prompt="x" * 70
    )
    result = shop.attempt("--plan", "--assume-tps", "100", run=name)
    assert result.status == 0
    assert [line for line in result.stdout.splitlines() if len(line) > COLUMNS and "x" * 70 not in line] == []
    shutil.rmtree(shop.datasets)
    result = shop.attempt("--plan", "--assume-tps", "100", run=name)
    assert [line for line in result.stdout.splitlines() if len(line) > COLUMNS and "x" * 70 not in line] == []


# The machine that a run means, and its price


def test_a_run_is_planned_for_the_machine_that_it_is_named_after(tmp_path: Path) -> None:
    """On a computer without GPUs, where one process stands for all of them; or for the one whose price it has."""
    result = plan_shipped(tmp_path, "8xh100m80-fast")
    narrow(result)
    found = rows(result)
    assert found["machine"].startswith("8x H100 80 GiB (by the run's name; ")
    assert found["global batch"].startswith("8 ranks x 27 sequences")
    assert "(estimated for 8 x H100: 2,230,000 to 3,350,000; " in found["speed"]
    assert "estimated: $6.61 to $9.91" in found["cost"]
    shop = Workshop(tmp_path)
    found = rows(shop.attempt("--plan", run="8xh100m80-fast", environment=ranking(0)))
    assert found["machine"].startswith("2 x H100 in place of 8x H100 80 GiB (by the run's name; ")
    assert "$6.38/h, the price of 2x H100 80 GiB on 2025-12-05" in found["cost"]
    (tmp_path / "runs" / "8xh100m80-fast").rename(tmp_path / "runs" / "mine")
    assert rows(shop.attempt("--plan", run="mine"))["machine"].startswith("8x H100 80 GiB (by price_per_hour; ")
    train = tmp_path / "runs" / "mine" / "train.json"
    train.write_text(train.read_text().replace("23.92", "24"))
    found = rows(shop.attempt("--plan", run="mine"))
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
    result = plan_shipped(tmp_path, "8xh100m80", "--assume-device", device, price_per_hour=price)
    narrow(result)
    assert said in rows(result)["cost"]


def test_a_vocabulary_far_larger_than_the_datasets_is_remarked_on(shop: Workshop) -> None:
    """Not one that is padded, and only where the model can be changed still."""
    meta = shop.datasets / "local" / "letters" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"vocab_size": 64}))
    shop.add_run(model={"vocab_size": 96}, min_train_tokens=64)
    assert "note" not in rows(shop.attempt("--plan"))
    shop.add_run(model={"vocab_size": 640}, min_train_tokens=64)
    said = (
        '"vocab_size" in model.json is 640, but local/letters has 64 tokens: 18,432 of 27,328 parameters are never used'
    )
    assert rows(shop.attempt("--plan"))["note"] == f"{said}; set it to 64"
    trained = shop.attempt()
    assert f"note: {said}" in trained.stdout
    shop.add_run(model={"vocab_size": 640}, min_train_tokens=128)
    assert "note" not in rows(shop.attempt("--plan"))


# Benchmarks, and weights to start from

BENCHMARKS: dict[str, Any] = {
    "benchmark_interval": 4,
    "benchmark_tasks": ["piqa", "arc_easy"],
    "benchmark_examples": 50,
}


def test_benchmarks_are_counted_and_their_time_said_to_be_unknown(shop: Workshop) -> None:
    """Twenty steps: after 0, 4, 8, 12, 16 and the last."""
    shop.add_run(**BENCHMARKS, price_per_hour=36.0)
    result = shop.attempt("--plan", "--assume-tps", "64")
    found = rows(result)
    assert (
        found["benchmarks"] == "6 (piqa, arc_easy; 50 examples each) how long they take is not known, and not counted"
    )
    assert "benchmarks" not in found["time"] + found["cost"]
    assert list(found).index("benchmarks") == list(found).index("validations") + 1
    narrow(result)
    shop.add_run(price_per_hour=36.0)
    assert "benchmarks" not in rows(shop.attempt("--plan", "--assume-tps", "64"))


def test_benchmarks_take_as_long_as_this_runs_earlier_ones(shop: Workshop) -> None:
    """The earlier ones are those of a summary of 9 steps, with evaluations after 0, 4 and 8."""
    run = shop.add_run(**BENCHMARKS, price_per_hour=36.0)
    experiment = Experiment.load(RunDirectory(run), shop.datasets)
    alike = {"global_steps": 9, "seconds": {"training": 20.0, "benchmarks": 30.0, "total": 50.0}}
    add_summary(run, experiment, **alike)
    for arguments in ((), ("--assume-tps", "96"), ("--assume-tps-with-validation", "96")):
        found = rows(shop.attempt("--plan", *arguments))
        assert found["benchmarks"] == "6 (piqa, arc_easy; 50 examples each)"
        assert "+ 60 s benchmarks, as this run's earlier ones" in found["time"]
        assert " + $0.60 benchmarks = $" in found["cost"]
        parts = [float(part) for part in re.findall(r"\$([\d.]+)", found["cost"])]
        assert parts[3] == pytest.approx(sum(parts[:3]), abs=0.011)
    narrow(shop.attempt("--plan"))
    other_tasks = experiment.config.model_dump(mode="json") | {"benchmark_examples": 51}
    for values in ({"train": other_tasks}, {"seconds": {"training": 20.0}}, {"world_size": 2}, {"global_steps": None}):
        add_summary(run, experiment, **alike | values)
        assert "not counted" in rows(shop.attempt("--plan", "--assume-tps", "96"))["benchmarks"], values


def test_a_plan_names_and_checks_the_weights_to_start_from(shop: Workshop, tmp_path: Path) -> None:
    """The plan checks them as training does at its start; a run that continues does not need them."""
    weights = tmp_path / "runs" / "r" / "start.safetensors"
    shop.add_run(initial_weights="start.safetensors")
    assert shop.attempt("--plan").error_lines == [f"error: {weights}: no such file"]
    weights.write_bytes(b"not one")
    assert f"{weights}: not a readable safetensors file" in shop.attempt("--plan").error_lines[0]
    shop.add_run("other", model={"emb_dim": 32}, min_train_tokens=64)
    assert shop.attempt(run="other").status == 0
    shutil.copy(shop.runs / "other" / "checkpoints" / "latest" / "model.safetensors", weights)
    planned, trained = shop.attempt("--plan"), shop.attempt()
    assert "not this model: tensor tok_emb.weight is [64, 32] in the file, [64, 16] in model.json" in planned.stderr
    assert planned.error_lines == trained.error_lines
    shop.add_run("like", min_train_tokens=64)
    assert shop.attempt(run="like").status == 0
    shutil.copy(shop.runs / "like" / "checkpoints" / "latest" / "model.safetensors", weights)
    assert rows(shop.attempt("--plan"))["starts from"].replace(" ", "") == str(weights)
    assert shop.attempt().status == 0
    weights.unlink()
    assert "starts from" not in rows(shop.attempt("--plan"))
    assert "no such file" in shop.attempt("--plan", "--restart").stderr


# Tokens per second of eight GPUs by estimate, as --plan rounds them; the notebook measured 234,480 to 778,107.
ON_PAPER = {
    "8xa100m40": ("A100 40GB", 1_270_000),
    "8xa100m80": ("A100 80GB", 1_440_000),
    "8xh100m80": ("H100", 3_180_000),
    "8xb200m160": ("B200", 6_180_000),
}


@pytest.mark.parametrize("name", ON_PAPER)
def test_a_speed_on_paper(tmp_path: Path, name: str) -> None:
    """An estimate is called one, with a range, wherever speed, time or cost stand."""
    device, speed = ON_PAPER[name]
    result = plan_shipped(tmp_path, name, "--assume-world-size", "8", "--assume-device", device)
    narrow(result)
    found = rows(result)
    assert found["speed"].startswith(f"{speed:,} tokens/s of training alone, without validation (estimated for 8 x")
    low, high = (number(part) for part in found["speed"].partition(f"8 x {device}: ")[2].split(" to "))
    assert [low, high] == pytest.approx([0.8 * speed, 1.2 * speed], rel=0.005)
    total = float(re.findall(r"\$([\d.]+)", found["cost"])[2])
    cheap, dear = (float(each) for each in re.findall(r"\$([\d.]+)", found["cost"].partition("estimated: ")[2]))
    assert [cheap, dear] == pytest.approx([total / 1.2, total / 0.8], abs=0.011)
    assert re.search(r"estimated: [\d.]+ (h|s) to [\d.]+ h in all", found["time"])
    assert total < BILLS[name][2] / 2, "the notebook's machine, with this program"


@pytest.mark.parametrize(("name", "speed"), [("8xa100m40", 984_000), ("8xh100m80", 2_740_000)])
def test_a_stack_of_levers_with_muon_has_hours_and_dollars_on_paper(tmp_path: Path, name: str, speed: int) -> None:
    """GPT-2 small with the levers of the public speed record, beside the same run without them."""
    device, plain = ON_PAPER[name]
    plan_shipped(tmp_path, name, "--assume-world-size", "8", optimizer="muon", lr_schedule="linear")
    model = tmp_path / "runs" / name / "model.json"
    model.write_text(json.dumps(json.loads(model.read_text()) | FAST))
    result = Workshop(tmp_path).attempt("--plan", "--assume-world-size", "8", "--assume-device", device, run=name)
    narrow(result)
    found = rows(result)
    assert found["speed"].startswith(f"{speed:,} tokens/s of training alone, without validation (estimated for 8 x")
    assert 0.6 * plain < speed < plain
    assert re.search(r"estimated: [\d.]+ (h|s) to [\d.]+ h in all", found["time"])
    hours = float(found["time"].split(" h training")[0])
    tokens = int(found["tokens"].replace(",", ""))
    assert hours == pytest.approx(tokens / speed / 3600, abs=0.006)
    price = float(found["cost"].split("at $")[1].split("/h")[0])
    dollars = float(re.findall(r"\$([\d.]+)", found["cost"])[0])
    assert dollars == pytest.approx(tokens / speed / 3600 * price, abs=0.01)


# The width for which even the smallest microbatch is more work for a GPU than launching its kernels is for a CPU.
LARGE_ENOUGH = {"emb_dim": 4096, "n_layers": 1}


def test_only_estimates_are_called_so(shop: Workshop) -> None:
    shop.add_run(price_per_hour=36.0)
    assert "estimated:" not in shop.attempt("--plan", "--assume-tps", "10").stdout


def test_a_measured_speed_comes_first(shop: Workshop) -> None:
    """On the device that is assumed, or on any if none is; another's does not count."""
    experiment = Experiment.load(RunDirectory(shop.add_run(model=LARGE_ENOUGH)), shop.datasets)
    add_summary(shop.runs / "r", experiment, device="NVIDIA H100 80GB HBM3")
    assert rows(shop.attempt("--plan", "--assume-device", "H100"))["speed"].startswith("96 tokens/s")
    found = rows(shop.attempt("--plan", "--assume-device", "H200"))
    assert "(estimated for 1 x H200: " in found["speed"]


def test_a_device_that_nothing_is_known_of(shop: Workshop) -> None:
    shop.add_run()
    result = shop.attempt("--plan", "--assume-device", "A100")
    assert result.status == 2
    assert result.stderr.startswith('error: --assume-device: nothing is known of "A100"; there is A100 40GB, A100 80GB')
    assert result.stderr.count("\n") == 1
    result = shop.attempt("--plan", "--assume-device", "H100", "--assume-tps", "10")
    assert (result.status, result.stderr) == (2, "error: --assume-device and --assume-tps: give one of them\n")
    result = shop.attempt("--assume-device", "H100")
    assert (result.status, result.stderr) == (2, "error: --assume-device belongs with --plan\n")


def test_what_is_not_on_paper_either(shop: Workshop) -> None:
    shop.add_run(precision="fp32")
    found = rows(shop.attempt("--plan", "--assume-device", "H100"))
    assert found["time and cost"].startswith('unknown: no estimated speed for H100: "precision": "fp32" is not covered')
    shop.add_run()
    found = rows(shop.attempt("--plan", "--assume-device", "H100", "--assume-world-size", "16"))
    assert "16 ranks are more than one machine" in found["time and cost"]


def test_a_model_too_small_for_a_speed_on_paper(tmp_path: Path) -> None:
    """The quickstart: its GPU would wait for the CPU most of the time, and nothing tells for how long."""
    result = plan_shipped(tmp_path, "quickstart", "--assume-device", "H100")
    narrow(result)
    found = rows(result)
    assert found["time and cost"].startswith("unknown: no estimated speed for H100: launching the kernels")
    assert "--assume-tps" in found["time and cost"]
    assert "speed" not in found


def test_this_machines_own_gpus(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is for this machine's GPUs if there is one for each rank, and they are alike."""
    experiment = Experiment.load(RunDirectory(shop.add_run(model=LARGE_ENOUGH)), shop.datasets)
    values: dict[str, Any] = dict.fromkeys((field.name for field in fields(TrainOptions)), None)
    nothing_said = TrainOptions(**values)

    def source(ranks: int, *gpus: str) -> str:
        monkeypatch.setattr(planned_speed, "gpu_names", lambda: list(gpus))
        return plan_speed(experiment, experiment.layout(ranks), nothing_said).source

    assert source(2, "NVIDIA H200", "NVIDIA H200").startswith("estimated for 2 x H200: ")
    for few_or_strange in (["NVIDIA H200"], ["NVIDIA H200", "NVIDIA H100 80GB HBM3"], ["NVIDIA L4", "NVIDIA L4"], []):
        assert source(2, *few_or_strange).startswith("no earlier run of this shape; give --assume-tps")
