"""The runs in the repository load, and have the settings of the lab notebook's runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpt import load_model_config
from harness.common.json_files import read_json_object
from harness.data.loader import BatchLayout, BatchSchedule
from harness.planning.rates import build_schedule
from harness.runs.directory import RunDirectory
from harness.runs.train_config import load_train_config
from harness.sweeps.file import load_sweep
from tests.support.isolation import ROOT, SHIPPED_RUNS

QUICKSTARTS = ["quickstart", "quickstart-gpt2"]
FAST = ["8xa100m40-fast", "8xh100m80-fast"]
SHIPPED = [*QUICKSTARTS, *FAST, "test", "original", "8xa100m40", "8xa100m80", "8xh100m80", "8xb200m160"]

# Exact figures of the notebook's table: microbatch, dollars per hour, global steps, tokens.
MACHINES: dict[str, tuple[int, float, int, int]] = {
    "8xa100m40": (13, 10.32, 30_614, 3_260_268_544),
    "8xh100m80": (27, 23.92, 14_740, 3_260_252_160),
    "8xa100m80": (28, 14.32, 14_214, 3_260_350_464),
    "8xb200m160": (64, 39.92, 6_219, 3_260_547_072),
}
GPT2_SMALL = {
    "vocab_size": 50257,
    "context_length": 1024,
    "emb_dim": 768,
    "n_heads": 12,
    "n_layers": 12,
    "drop_rate": 0.1,
    "qkv_bias": False,
}
CHINCHILLA_TOKENS = 3_260_190_720
FINEWEB = "gpjt/fineweb-gpt2-tokens"


def train_json(name: str) -> dict[str, Any]:
    return read_json_object(SHIPPED_RUNS / name / "train.json")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_run_loads(name: str) -> None:
    run = RunDirectory.find(SHIPPED_RUNS, name)
    config, model = load_train_config(run.train_json), load_model_config(run.model_json)
    assert config.min_train_tokens is not None
    assert config.min_train_tokens == -1 or config.min_train_tokens >= model.context_length
    if config.min_train_tokens != -1:
        world_size = 8 if name in MACHINES else 1
        steps = config.accumulation_steps(world_size)
        layout = BatchLayout(world_size, steps, config.microbatch_size, model.context_length)
        total = BatchSchedule.constant(layout).num_steps(config.min_train_tokens, 2**62)
        build_schedule(config, total)  # raises UserError if the warm-up is longer than the run


def test_what_training_leaves_in_a_shipped_run_is_no_change_to_the_repository(tmp_path: Path) -> None:
    """Git ignores what training writes into a shipped run. In a user's own run it shows the summary, the chart and
    results, which a user may want to commit."""
    shutil.copyfile(ROOT / ".gitignore", tmp_path / ".gitignore")
    files = ["summary.json", "training-run-chart.png", "metrics.jsonl", "ift-responses.json", "judgements.jsonl"]
    files += ["results/microbatch-search-cpu.json", "results/loss.json", "checkpoints/a/meta.json", "aside/1/old.json"]

    def git(*arguments: str) -> list[str]:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.splitlines()

    git("init", "-q")
    for name in SHIPPED:
        shutil.copytree(SHIPPED_RUNS / name, tmp_path / "runs" / name)
        git("add", "-f", f"runs/{name}")
    git("add", ".gitignore")
    git("commit", "-qm", "a clone")
    for name in (*SHIPPED, "mine"):
        for file in files:
            path = tmp_path / "runs" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("new")
    own = ["ift-responses.json", "judgements.jsonl", "results/loss.json", "results/microbatch-search-cpu.json"]
    own += ["summary.json", "training-run-chart.png"]
    assert git("status", "--porcelain", "--untracked-files=all") == [f"?? runs/mine/{file}" for file in own]


@pytest.mark.parametrize("name", MACHINES)
def test_the_rented_machines_have_the_notebooks_numbers(name: str) -> None:
    microbatch, price, steps, tokens = MACHINES[name]
    config = load_train_config(SHIPPED_RUNS / name / "train.json")
    assert (config.microbatch_size, config.price_per_hour) == (microbatch, price)
    assert (config.validation_interval, config.validation_batches) == (617, 300)
    assert (config.min_train_tokens, config.start_train_token, config.start_val_token) == (CHINCHILLA_TOKENS, 0, 0)
    assert config.dataset == FINEWEB
    assert config.min_train_tokens is not None
    layout = BatchLayout(8, config.accumulation_steps(8), microbatch, 1024)
    assert BatchSchedule.constant(layout).num_steps(config.min_train_tokens, 2**62) == steps
    assert steps * layout.global_tokens == tokens
    # The runs' other settings change no number. With them seven GPUs do not wait while one validates, no GPU waits for
    # the disk, and the disk does not fill up with 93 GiB of checkpoints.
    assert (config.validation_ranks, config.async_checkpoint, config.keep_checkpoints) == ("all", True, 3)
    notebook = {"dataset", "microbatch_size", "min_train_tokens", "start_train_token", "price_per_hour"}
    notebook |= {"validation_interval", "validation_batches", "start_val_token"}
    assert train_json(name).keys() == notebook | {"validation_ranks", "async_checkpoint", "keep_checkpoints"}


@pytest.mark.parametrize("name", [*MACHINES, "original"])
def test_the_model_is_gpt2_small(name: str) -> None:
    assert read_json_object(SHIPPED_RUNS / name / "model.json") == GPT2_SMALL
    assert load_model_config(SHIPPED_RUNS / name / "model.json").parameters == pytest.approx(163e6, rel=0.01)


def test_original_is_the_run_on_one_gpu() -> None:
    config = load_train_config(SHIPPED_RUNS / "original" / "train.json")
    assert (config.microbatch_size, config.min_train_tokens) == (6, CHINCHILLA_TOKENS)
    assert (config.validation_interval, config.validation_batches) == (5922, 3200)
    assert config.dataset == FINEWEB


def test_test_is_small_and_on_the_real_dataset() -> None:
    config = load_train_config(SHIPPED_RUNS / "test" / "train.json")
    assert config.dataset == FINEWEB
    assert config.min_train_tokens is not None
    assert config.min_train_tokens <= 10**6


def test_quickstart_needs_no_network_and_no_gpu() -> None:
    config = load_train_config(SHIPPED_RUNS / "quickstart" / "train.json")
    model = load_model_config(SHIPPED_RUNS / "quickstart" / "model.json")
    assert config.dataset == "builtin/python-stdlib"
    assert config.price_per_hour is None
    assert model.parameters < 20e6
    assert config.validates


def test_quickstart_fits_the_dataset_it_trains_on() -> None:
    from harness.data.preparation.builtin import DEFAULT_VOCAB_SIZE

    model = load_model_config(SHIPPED_RUNS / "quickstart" / "model.json")
    assert model.vocab_size == DEFAULT_VOCAB_SIZE, "a smaller one is refused; a larger one has untrained embeddings"


@pytest.mark.parametrize("name", FAST)
def test_the_fast_runs_see_the_same_data_as_the_notebooks(name: str) -> None:
    own, notebooks = train_json(name), train_json(name.removesuffix("-fast"))
    for key in notebooks:
        assert own[key] == notebooks[key], key


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.json")), ids=lambda path: path.name)
def test_every_sweep_makes_runs_that_can_be_trained(path: Path) -> None:
    sweep = load_sweep(path, SHIPPED_RUNS)
    for run in sweep.runs:
        run.check_startable()
