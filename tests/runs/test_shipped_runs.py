"""The runs in the repository load, and have the settings of the lab notebook's runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpt import load_model_config
from harness.common.json_files import read_json_object
from harness.data.preparation.builtin import DEFAULT_VOCAB_SIZE
from harness.planning.experiment import Experiment
from harness.runs.directory import RunDirectory
from harness.runs.train_config import load_train_config
from harness.sweeps.file import load_sweep
from tests.support.configs import SEED_MODEL
from tests.support.isolation import ROOT, SHIPPED_RUNS

QUICKSTARTS = ["quickstart", "quickstart-gpt2"]
FAST = ["8xa100m40-fast", "8xh100m80-fast"]
SHIPPED = [*QUICKSTARTS, *FAST, "gpt2-124m", "test", "original", "8xa100m40", "8xa100m80", "8xh100m80", "8xb200m160"]

# Exact figures of the notebook's table: microbatch, dollars per hour, global steps, tokens.
MACHINES: dict[str, tuple[int, float, int, int]] = {
    "8xa100m40": (13, 10.32, 30_614, 3_260_268_544),
    "8xh100m80": (27, 23.92, 14_740, 3_260_252_160),
    "8xa100m80": (28, 14.32, 14_214, 3_260_350_464),
    "8xb200m160": (64, 39.92, 6_219, 3_260_547_072),
}
CHINCHILLA_TOKENS = 3_260_190_720
FINEWEB = "gpjt/fineweb-gpt2-tokens"


def train_json(name: str) -> dict[str, Any]:
    return read_json_object(SHIPPED_RUNS / name / "train.json")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_run_loads(name: str) -> None:
    run = RunDirectory.find(SHIPPED_RUNS, name)
    experiment = Experiment.load(run, SHIPPED_RUNS)
    layout = experiment.layout(8 if name in MACHINES else 1)
    tokens = experiment.config.min_train_tokens
    assert tokens is not None
    assert tokens == -1 or tokens >= experiment.model.context_length
    experiment.position(layout, [2**62], None)  # raises UserError if the warm-up is longer than the run


def test_what_training_leaves_in_a_shipped_run_is_no_change_to_the_repository(tmp_path: Path) -> None:
    """Git ignores what training writes into a shipped run. In a user's own run Git shows the summary, the chart and
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
    microbatch, price, _, _ = MACHINES[name]
    config = load_train_config(SHIPPED_RUNS / name / "train.json")
    assert (config.microbatch_size, config.price_per_hour) == (microbatch, price)
    assert (config.validation_interval, config.validation_batches) == (617, 300)
    assert (config.min_train_tokens, config.start_train_token, config.start_val_token) == (CHINCHILLA_TOKENS, 0, 0)
    assert config.dataset == FINEWEB
    # The runs' other settings change no number. With them seven GPUs do not wait while one validates, no GPU waits for
    # the disk, and the disk does not fill up with 93 GiB of checkpoints.
    assert (config.validation_ranks, config.async_checkpoint, config.keep_checkpoints) == ("all", True, 3)
    notebook = {"dataset", "microbatch_size", "min_train_tokens", "start_train_token", "price_per_hour"}
    notebook |= {"validation_interval", "validation_batches", "start_val_token"}
    assert train_json(name).keys() == notebook | {"validation_ranks", "async_checkpoint", "keep_checkpoints"}


def test_gpt2_on_ten_billion_tokens() -> None:
    """The run has GPT-2 small's parameters, which are 124,439,808 (Radford et al. 2019), and llm.c's batch and steps,
    on any number of GPUs that divides 16."""
    run = RunDirectory.find(SHIPPED_RUNS, "gpt2-124m")
    experiment = Experiment.load(run, SHIPPED_RUNS)
    assert experiment.model.parameters == 124_439_808
    for ranks in (1, 2, 4, 8, 16):
        layout = experiment.layout(ranks)
        assert layout.global_tokens == 2**19
        assert experiment.position(layout, [9_900_000_000], None).total_steps == 19_074


def test_gpt2s_sizes() -> None:
    """The models of transformers called gpt2, gpt2-medium, gpt2-large and gpt2-xl have so many parameters."""
    runs = load_sweep(ROOT / "sweeps" / "gpt2-sizes.json", SHIPPED_RUNS).runs
    sizes = [run.model_config.parameters for run in runs]
    assert sizes == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]


@pytest.mark.parametrize("name", [*MACHINES, "original"])
def test_the_model_is_gpt2_small(name: str) -> None:
    assert read_json_object(SHIPPED_RUNS / name / "model.json") == SEED_MODEL
    assert load_model_config(SHIPPED_RUNS / name / "model.json").parameters == 163_009_536


def test_the_small_runs() -> None:
    """`original` is the notebook's run on one GPU. `test` is small, and has the same dataset as `original`.
    `quickstart` needs no network and no GPU, and states no price. Its model has the vocabulary of its dataset, because
    a smaller one is refused, and a larger one has untrained embeddings."""
    original, test, quick = (
        load_train_config(SHIPPED_RUNS / name / "train.json") for name in ("original", "test", "quickstart")
    )
    assert (original.microbatch_size, original.min_train_tokens) == (6, CHINCHILLA_TOKENS)
    assert (original.validation_interval, original.validation_batches) == (5922, 3200)
    assert original.dataset == test.dataset == FINEWEB
    assert test.min_train_tokens is not None
    assert test.min_train_tokens <= 10**6
    assert (quick.dataset, quick.price_per_hour, quick.validates) == ("builtin/python-stdlib", None, True)
    model = load_model_config(SHIPPED_RUNS / "quickstart" / "model.json")
    assert (model.vocab_size, model.parameters < 20e6) == (DEFAULT_VOCAB_SIZE, True)


@pytest.mark.parametrize("name", FAST)
def test_the_fast_runs_see_the_same_data_as_the_notebooks(name: str) -> None:
    """A fast run's batch on eight GPUs is the batch that its rates are for. It trains on the notebook's tokens, and
    validates on the text of the notebook's run on the same machine, after as many tokens to 1 %."""
    own, notebooks = train_json(name), train_json(name.removesuffix("-fast"))
    for key in notebooks.keys() - {"microbatch_size", "validation_interval", "validation_batches"}:
        assert own[key] == notebooks[key], key
    assert 8 * 1024 * own["microbatch_size"] == own["scale_with_batch"]["reference_tokens"] == 524_288
    between, theirs = (each["validation_interval"] * each["microbatch_size"] for each in (own, notebooks))
    assert between == pytest.approx(theirs, rel=0.01)
    assert own["validation_sequences"] == notebooks["validation_batches"] * notebooks["microbatch_size"]


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.json")), ids=lambda path: path.name)
def test_every_sweep_makes_runs_that_can_be_trained(path: Path) -> None:
    sweep = load_sweep(path, SHIPPED_RUNS)
    for run in sweep.runs:
        run.check_startable()
