"""--plan: its numbers against the notebook's figures and against brute force, and the runs that it refuses."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpt import GPTModel, ModelConfig
from harness.common.errors import UserError
from harness.data.loader import BatchLayout
from harness.model.config import load_model_config
from harness.planning.experiment import Position
from harness.planning.memory import step_bytes
from harness.planning.plan import make_plan
from harness.runs import checkpoints
from harness.runs.directory import RunDirectory
from tests.runs.test_shipped_runs import MACHINES
from tests.support.configs import refusal
from tests.support.isolation import SHIPPED_RUNS
from tests.support.launch import MODEL, Workshop, rank_variables
from tests.support.planning import EIGHT, add_summary, dollars, experiment_of, number, plan, rows, shipped, table


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# The notebook's runs

PEAKS = {"8xa100m40": 8.32, "8xh100m80": 13.55, "8xb200m160": 27.23}  # GB of a compiled step (docs/LOG.md)


@pytest.mark.parametrize("name", MACHINES)
def test_the_notebooks_figures(tmp_path: Path, name: str) -> None:
    """Plans have the steps and tokens of the notebook's runs. At one step a second, time and cost follow from the
    steps. A validation of 300 microbatches is divided among eight ranks, so each rank evaluates at most 38 of them."""
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
    if peak := PEAKS.get(name):
        said = re.match(r"([\d.]+) of (\d+) GiB on each GPU", found["memory"])
        assert said
        assert float(said[1]) == pytest.approx(peak * 1e9 / 2**30, rel=0.05)
        assert said[2] == name.rpartition("m")[2]
    said = re.match(r"([\d.]+) h training \+ ([\d.,]+) (h|s) validation", found["time"])
    assert said
    assert float(said[1]) == pytest.approx(steps / 3600, abs=0.005)
    validating = float(said[2]) * (3600 if said[3] == "h" else 1)
    assert validating == pytest.approx(validations * 38 / 3, abs=19 if said[3] == "h" else 0.6)
    assert dollars(found)[0] == pytest.approx(steps / 3600 * price, abs=0.005)


@pytest.mark.parametrize("name", ["quickstart", "test", "original"])
def test_the_other_shipped_runs_have_plans(tmp_path: Path, name: str) -> None:
    where = shipped(tmp_path, name)
    before = files(tmp_path)
    printed = plan(where, name)
    found = table(printed)
    assert number(found["global steps"]) > 0
    if name == "original":
        speed = "19,678 tokens/s of training alone, without validation (reported for 1x RTX 3090"
        assert found["speed"].startswith(speed)
        assert found["time"].startswith("46.02 h training"), "the notebook's progress bar showed 46 hours"
        assert "memory" not in found, "there is no GPU here, and the machine is not in the list"
    else:
        assert "give --assume-tps" in found["time and cost"]
    assert all(key in printed for key in ("dataset=", "microbatch_size=", "emb_dim="))
    assert not any(key in printed for key in ("bucket_mb=", "random_seed")), "keys with default values are printed"
    assert (files(tmp_path), where.datasets.exists()) == (before, False), "a file was written or downloaded"
    assert f"is not in {where.datasets}, so".replace(" ", "") in found["note"].replace(" ", "")


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
def test_counts_agree_with_brute_force(shop: Workshop, train: dict[str, Any]) -> None:
    ranks = 4 if "keep_checkpoints" in train else 1
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
    assert rows(shop)["starts from"] == "new weights"


def test_a_key_that_cannot_be_lower_is_no_remedy(shop: Workshop) -> None:
    """`min_train_tokens` -1 takes all tokens that there are."""
    whole = {"min_train_tokens": -1, "gradient_accumulation_steps": 200}
    for name, train, remedy in (
        ("whole", whole, "; lower the batch, or allow"),
        ("behind", whole | {"start_train_token": 9}, "; lower start_train_token or the batch, or allow"),
        ("steps", {"min_train_tokens": None, "train_steps": 999}, "; lower train_steps or the batch, or allow"),
        ("warm", {"min_train_tokens": -1, "warmup_steps": 999}, "or make the run longer$"),
    ):
        shop.add_run(name, **train)
        with pytest.raises(UserError, match=remedy):
            make_plan(experiment_of(shop, name), 1, None)


def test_the_memory_of_a_step_is_at_least_that_of_its_update(tmp_path: Path) -> None:
    """Weights, gradients and AdamW's two moments have 16 bytes for each parameter. In a model with large tables and a
    small microbatch, the activations are smaller than these gradients."""
    experiment = experiment_of(shipped(tmp_path, "8xh100m80-fast"), "8xh100m80-fast")
    model = experiment.model.model_copy(update={"n_layers": 2, "value_embeddings": 2})
    config = experiment.config.model_copy(update={"optimizer": "adamw", "shard_optimizer": False})
    needed = step_bytes(model, config, BatchLayout(1, 1, 1, model.context_length))
    assert needed is not None
    assert 16 * model.parameters <= needed < 1.1 * 16 * model.parameters


# GiB that torch allocated at the peak of a compiled step on the null device (tests/nullcuda/steps.py): changes of a
# model of 2 layers of 768, and the microbatch of one rank.
SMALL_STEPS: list[tuple[dict[str, Any], int, float]] = [
    ({"drop_rate": 0.1}, 8, 2.219),
    ({"n_layers": 3}, 1, 1.593),
    ({"tie_weights": True}, 1, 1.038),
    ({"n_layers": 3, "vocab_size": 8192, "context_length": 4096}, 4, 2.193),
    ({"vocab_size": 256000}, 1, 6.274),
    ({"vocab_size": 256000, "tie_weights": True}, 4, 4.262),
]


@pytest.mark.parametrize(("model", "microbatch", "gib"), SMALL_STEPS)
def test_the_memory_of_a_step_with_a_small_loss_or_a_large_head(
    tmp_path: Path, model: dict[str, Any], microbatch: int, gib: float
) -> None:
    experiment = experiment_of(shipped(tmp_path, "8xh100m80"), "8xh100m80")
    shape = ModelConfig(
        vocab_size=50257, context_length=1024, emb_dim=768, n_heads=12, n_layers=2, drop_rate=0.0, qkv_bias=False
    )
    shape = shape.model_copy(update=model)
    needed = step_bytes(shape, experiment.config, BatchLayout(1, 1, microbatch, shape.context_length))
    assert needed == pytest.approx(gib * 2**30, rel=0.03)


# GiB at the peak of a compiled step with activation checkpointing, measured as those above: ranks, changes of the model
# of 8xh100m80, precision of the residual stream, microbatch, GiB.
CHECKPOINTED_STEPS: list[tuple[int, dict[str, Any], str, int, float]] = [
    (1, {"n_layers": 4}, "fp32", 8, 1.976),
    (1, {"n_layers": 4}, "fp32", 48, 3.800),
    (8, {"n_layers": 4}, "fp32", 96, 6.622),
    (8, {}, "fp32", 48, 6.091),
    (1, {"n_layers": 4, "emb_dim": 1536}, "fp32", 32, 6.645),
    (1, {"n_layers": 4, "vocab_size": 4096}, "fp32", 64, 3.687),
    (1, {"n_layers": 4, "drop_rate": 0.0}, "bf16", 96, 5.388),
]


@pytest.mark.parametrize(("ranks", "model", "residual", "microbatch", "gib"), CHECKPOINTED_STEPS)
def test_the_memory_of_a_step_with_activation_checkpointing(
    tmp_path: Path, ranks: int, model: dict[str, Any], residual: str, microbatch: int, gib: float
) -> None:
    settings = {"activation_checkpointing": True, "residual_precision": residual}
    experiment = experiment_of(shipped(tmp_path, "8xh100m80", **settings), "8xh100m80")
    shape = experiment.model.model_copy(update=model)
    needed = step_bytes(shape, experiment.config, BatchLayout(ranks, 1, microbatch, shape.context_length))
    assert needed == pytest.approx(gib * 2**30, rel=0.02)


def test_a_step_that_no_gpu_can_hold_is_remarked_on(tmp_path: Path) -> None:
    for microbatch, is_too_much in ((100, False), (120, True)):
        where = shipped(tmp_path / str(microbatch), "8xa100m40", microbatch_size=microbatch)
        memory = rows(where, "8xa100m40", **EIGHT, assume_device="A100 40GB")["memory"]
        assert (float(memory.split()[0]) > 40) == is_too_much == ("too much" in memory)


def test_the_work_and_disk_of_a_run_that_has_begun(shop: Workshop) -> None:
    """A trained run has as many checkpoints as planned, of the planned size, also with a tied head. A plan for a run
    that has begun counts only the remaining steps. The speed of an earlier run of only four steps is not used."""
    model = {"emb_dim": 128, "vocab_size": 4096, "tie_weights": True}
    wide: dict[str, Any] = {"model": model, "validation_interval": 2, "price_per_hour": 36.0}
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
    assert re.search(r"measured over 4 steps, 256 tokens, [\d.]+ s; a plan needs at least 20 steps and 10 s ", refusal)

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


def test_a_disk_too_small_is_refused(shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk that counts is that of the checkpoints, which may be a link."""
    run = shop.add_run(model={"emb_dim": 512}, checkpoint_interval=1)
    planned = make_plan(experiment_of(shop), 2, None)
    free = planned.disk_bytes()
    assert planned.checkpoints() == 10
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    planned.check_disk()
    free -= 1
    words = (
        rf"^{re.escape(str(run))}: the run needs ([\d,]+) bytes for 10 checkpoints, but (?!\1)[\d,]+ bytes.*keep fewer"
    )
    with pytest.raises(UserError, match=words):
        planned.check_disk()
    (tmp_path / "elsewhere").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    spaces = {run / "checkpoints": free + 1, run: 0}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=spaces[path]))
    planned.check_disk()
    shop.add_run("kept", model={"emb_dim": 512}, checkpoint_interval=1, keep_checkpoints=2)
    smaller = make_plan(experiment_of(shop, "kept"), 2, None)
    # two kept, best, latest, one being written, and after a stop the one that the run continued from
    assert smaller.disk_bytes() == 6 * planned.checkpoint_bytes()
    free = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert re.search(
        r"[\d.]+ MiB for [\d,]+ checkpoints \(at most 6 more on the disk at a time\), but 0\.00 MiB are free;",
        str(smaller.disk_shortage()),
    )


@pytest.mark.parametrize("keep", [1, 2])
def test_the_room_for_checkpoints_suffices_and_is_needed(shop: Workshop, keep: int) -> None:
    """However a run's best checkpoints come and whenever it is stopped, it never has more checkpoints on the disk than
    its plans have admitted, at the start and whenever it continues; and a run that is stopped can have as many."""
    steps, most = 12, keep + 4
    run = RunDirectory(shop.add_run(checkpoint_interval=1, keep_checkpoints=keep, min_train_tokens=64 * steps))
    planned, folder, chance = make_plan(experiment_of(shop), 1, None), run.checkpoints, random.Random(0)
    assert planned.added_checkpoints() == most
    peaks = []
    for _ in range(60):
        folder.mkdir()
        start, stops, peak, admitted = None, {chance.randrange(1, steps) for _ in range(2)}, 0, most
        for step in range(steps):
            if step in stops:
                start, there = checkpoints.find_checkpoint(folder, "latest").name, len(list(folder.glob("2*")))
                position = Position(first_step=step, total_steps=steps, tokens_seen=64 * step)
                admitted = there + replace(planned, position=position, is_continued=True).added_checkpoints()
                assert admitted <= max(most, there + 1), "the disk that was enough for a new run still is"
            path = folder / f"20260101Z000000-iteration-{step}"
            path.mkdir()
            now = len(list(folder.glob("2*")))
            assert now <= admitted
            peak = max(peak, now)
            checkpoints.point(folder, "latest", path)
            if not step or chance.random() < 0.3:
                checkpoints.point(folder, "best", path)
            checkpoints.prune(folder, keep, {path.name, *([start] if start else [])})
        peaks.append(peak)
        shutil.rmtree(folder)
    assert max(peaks) == most


def test_a_plan_that_no_disk_can_hold_is_remarked_on(shop: Workshop) -> None:
    """A plan prints a note if the checkpoints do not fit on the disk. It does not fail, because torchrun would then
    print its own report on the failed ranks. Training refuses such a run."""
    shop.add_run(dataset="local/elsewhere", min_train_tokens=10**13, checkpoint_interval=1, price_per_hour=36.0)
    found = rows(shop, ranks=2, assume_tps=1e9)
    assert found["checkpoints"].startswith("78,125,000,000 (")
    assert found["cost"].startswith("$100.00 training")
    assert re.search(
        r"the run needs [\d,.]+ GiB for 78,125,000,000 checkpoints, but [\d,.]+ GiB are free", found["note"]
    )
    assert "train.json: keep_checkpoints" in found["note"]
    elsewhere = rows(shop, assume_world_size=2)["note"]
    assert "GiB" not in elsewhere, "this disk does not matter for another machine's plan"
    assert "local/elsewhere is not in" in elsewhere


def test_a_run_that_has_begun_whose_dataset_is_not_here(shop: Workshop) -> None:
    """A plan refuses another dataset before it is downloaded. With its own, the run starts from its checkpoint."""
    shop.add_run(min_train_tokens=64)
    assert shop.attempt().status == 0
    shop.add_run(dataset="local/elsewhere", min_train_tokens=128)
    assert 'made with "dataset": "local/letters"' in shop.attempt("--plan").stderr
    shop.add_run(min_train_tokens=-1)
    shutil.rmtree(shop.datasets)
    assert rows(shop)["starts from"] == "its checkpoint"


def test_a_vocabulary_far_larger_than_the_datasets_is_remarked_on(shop: Workshop) -> None:
    """A plan prints a note if the model's vocabulary is far larger than the dataset's, but not for a padded vocabulary,
    and not if the run has begun, because the model can then no longer be changed."""
    meta = shop.datasets / "local" / "letters" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"vocab_size": 64}))
    shop.add_run(model={"vocab_size": 96}, min_train_tokens=64)
    assert "note" not in rows(shop)
    shop.add_run(model={"vocab_size": 640}, min_train_tokens=64)
    said = '"vocab_size" in model.json is 640, but the tokenizer of local/letters has 64 tokens: 18,432 of 27,328'
    assert rows(shop)["note"] == f"{said} parameters are never used; set vocab_size to 64"
    assert f"note: {said} parameters are never used" in shop.attempt().stdout
    shop.add_run(model={"vocab_size": 640}, min_train_tokens=128)
    assert "note" not in rows(shop)


def test_long_names_fit_a_terminal(tmp_path: Path) -> None:
    name = "a-run-with-a-name-that-somebody-thought-about-for-longer-than-was-good"
    shop, dataset = Workshop(tmp_path), f"owner-of-datasets/{name}"
    shop.add_run(name, dataset=dataset, min_train_tokens=-1, sample_interval=5, sample_prompt="x" * 70)
    assert name in plan(shop, name, assume_tps=100.0)
    shop.add_dataset(dataset)
    assert name in plan(shop, name, assume_tps=100.0)


# The command


def test_under_torchrun_only_rank_0_prints(shop: Workshop) -> None:
    """With torchrun's environment variables only rank 0 prints the plan. The test runs the ranks one after the other,
    which works because ranks exchange nothing for a plan."""
    shop.add_run()
    results = [shop.attempt("--plan", environment=variables) for variables in rank_variables(2)]
    assert [(result.status, result.stderr) for result in results] == [(0, "")] * 2
    assert "2 ranks x 2 sequences x 2 accumulation" in table(results[0].stdout)["global batch"]
    assert results[1].stdout == ""


# Benchmarks, and initial weights

BENCHMARKS: dict[str, Any] = {
    "benchmark_interval": 4,
    "benchmark_tasks": ["piqa", "arc_easy"],
    "benchmark_examples": 50,
    "price_per_hour": 36.0,
}


def test_the_time_of_benchmarks_is_not_included(shop: Workshop) -> None:
    """A plan counts the benchmarks, but not their time, even if an earlier training of this run has recorded it."""
    shop.add_run(**BENCHMARKS)
    add_summary(shop, global_steps=9, seconds={"training": 20.0, "benchmarks": 30.0, "total": 50.0})
    found = rows(shop, assume_tps=64.0, restart=True)
    times = "6 (piqa, arc_easy; 50 examples each)"  # after steps 0, 4, 8, 12, 16 and the last
    assert found["benchmarks"] == f"{times} the time of benchmarks is unknown, and not included below"
    assert "benchmarks" not in found["time"] + found["cost"]
    assert list(found).index("benchmarks") == list(found).index("validations") + 1


def test_a_plan_names_and_checks_the_weights_to_start_from(shop: Workshop) -> None:
    """A plan checks the initial weights as training does at its start. A run that resumes from a checkpoint does not
    need them."""
    weights = shop.add_run(initial_weights="start.safetensors", min_train_tokens=64) / "start.safetensors"

    def write(**shape: int) -> None:
        torch.manual_seed(0)
        model = GPTModel(ModelConfig(**MODEL | shape))
        save_file({name: each.contiguous() for name, each in model.to_checkpoint_names().items()}, weights)

    named = f'{weights.with_name("train.json")}: key "initial_weights": {weights}: '
    missing = f"{named}no such file; name the model.safetensors"
    refusal(plan, shop, begins=missing)
    weights.write_bytes(b"not one")
    refusal(plan, shop, begins=f"{named}not a readable safetensors file")
    write(emb_dim=32)
    words = "not the model's weights: tensor tok_emb.weight is [64, 32] in the file, [64, 16] in the model"
    assert shop.attempt().refuses(words) == f"error: {refusal(plan, shop, begins='')}"
    write()
    assert rows(shop)["starts from"].replace(" ", "") == str(weights)
    assert shop.attempt().status == 0
    weights.unlink()
    assert "starts from" not in rows(shop)
    refusal(plan, shop, begins=missing, restart=True)
