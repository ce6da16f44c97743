"""Training on a mixture of datasets, through the real command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.data.tokenizers import train_bpe
from tests.support.in_process import InProcess
from tests.support.launch import metrics, summary_of, weights_of

NAMES = ("local/first", "local/second")


def mixture(*weights: float) -> list[dict[str, Any]]:
    return [{"name": name, "weight": weight} for name, weight in zip(NAMES, weights, strict=True)]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    """Train splits of 62 and 37 windows of 16 tokens, and validation splits of 31 windows."""
    shop = InProcess(tmp_path_factory.mktemp("mixtures"))
    for seed, (name, tokens) in enumerate(zip(NAMES, (1000, 600), strict=True)):
        shop.add_dataset(name, tokens=tokens, seed=seed)
    return shop


@pytest.fixture(scope="module")
def mixed(shop: InProcess) -> Path:
    """A run of 40 steps of four windows: 112 from the first dataset, and 48 from the second one."""
    keys: dict[str, Any] = {"dataset": mixture(0.7, 0.3), "epochs": "repeat", "shuffle": True}
    run = shop.add_run("mixed", **keys, min_train_tokens=40 * 64)
    said = "1.81 passes over 992 tokens of local/first and 1.30 passes over 592 tokens of local/second, in random order"
    assert said in " ".join(shop.train_here("mixed", "--plan").stdout.split())
    assert said in " ".join(shop.train_here("mixed").stdout.split())
    return run


@pytest.mark.slow
def test_the_passes_of_each_dataset_are_recorded(shop: InProcess, mixed: Path) -> None:
    expected = {"local/first": round(112 / 62, 4), "local/second": round(48 / 37, 4)}
    summary = summary_of(mixed)
    assert summary["epochs"] == expected
    assert [event["epochs"] for event in metrics(mixed, "train")][-1] == expected
    assert summary["dataset"]["name"] == "local/first + local/second"
    assert summary["dataset"]["train"]["tokens"] == 1600
    table = json.loads(shop.script("compare_runs.py", "mixed", "--json").stdout)
    assert table["runs"][0]["values"]["epochs"]["value"] == pytest.approx(112 / 62)


def test_a_mixture_of_one_is_that_dataset(shop: InProcess) -> None:
    for name, dataset in (("alone", NAMES[0]), ("one", [{"name": NAMES[0], "weight": 5}])):
        shop.add_run(name, dataset=dataset, min_train_tokens=256, shuffle=True)
        shop.train_here(name)
    assert weights_of(shop.runs / "alone") == weights_of(shop.runs / "one")


def test_the_validation_loss_is_that_of_each_dataset_by_its_share(shop: InProcess) -> None:
    """At a learning rate of almost 0, runs on the single datasets have the losses of the mixture's parts."""
    keys: dict[str, Any] = {"learning_rate": 1e-12, "min_train_tokens": 64, "precision": "fp32"}
    counts = {NAMES[0]: 14, NAMES[1]: 6}
    losses = {}
    for number, (name, count) in enumerate(counts.items()):
        run = shop.add_run(f"part-{number}", dataset=name, validation_batches=None, validation_sequences=count, **keys)
        shop.train_here(run.name)
        losses[name] = summary_of(run)["final_validation_loss"]
    run = shop.add_run("whole", dataset=mixture(7, 3), validation_batches=None, validation_sequences=20, **keys)
    printed = shop.train_here("whole").stdout
    (event,) = metrics(run, "validation")
    assert event["by_source"] == pytest.approx(losses, abs=1e-6)
    assert event["loss"] == pytest.approx(np.average([*losses.values()], weights=[*counts.values()]), abs=1e-6)
    assert f"(local/first {losses[NAMES[0]]:.3f}, local/second {losses[NAMES[1]]:.3f})" in printed


def test_all_tokens_are_those_until_a_dataset_ends(shop: InProcess) -> None:
    run = shop.add_run("all", dataset=mixture(1, 1), min_train_tokens=-1)
    shop.train_here("all")
    windows = summary_of(run)["tokens_seen"] // 16
    assert windows == 2 * 37 // 4 * 4  # of whole steps of four windows


def test_changed_weights_and_sources_are_refused_by_name(shop: InProcess, mixed: Path) -> None:
    given = json.loads((mixed / "train.json").read_text())
    for dataset, words in (
        (mixture(0.6, 0.4), "local/first: weight: 0.7 -> 0.6"),
        (NAMES[0], "made with another dataset"),
        ([*mixture(0.7, 0.3), {"name": "local/third", "weight": 1}], "local/third"),
    ):
        (mixed / "train.json").write_text(json.dumps(given | {"dataset": dataset, "min_train_tokens": 5120}))
        if "third" in words:
            shop.add_dataset("local/third", tokens=600, seed=3)
        shop.attempt(run="mixed").refuses(words)
    (mixed / "train.json").write_text(json.dumps(given))


def test_what_cannot_be_mixed_is_one_line(shop: InProcess) -> None:
    other = shop.add_dataset("local/other")
    train_bpe(iter(["a text of some words"] * 9), 270, other / "tokenizer.json")
    (other / "meta.json").write_text(json.dumps({"tokenizer": "tokenizer.json"}))
    twice = [{"name": NAMES[0], "weight": 1}] * 2
    for dataset, words in (
        ([{"name": NAMES[0], "weight": 1}, {"name": "local/other", "weight": 1}], "made with another tokenizer"),
        (twice, 'key "dataset": names a dataset twice'),
        (mixture(0.5, 0), 'key "dataset'),
        ([], 'key "dataset'),
        ([{"name": NAMES[0]}], "weight"),
        ([{"name": "local/firts", "weight": 1}], 'did you mean "local/first"?'),
    ):
        shop.add_run("impossible", dataset=dataset, min_train_tokens=256)
        shop.attempt(run="impossible").refuses(words)
    shop.add_run("late", dataset=mixture(1, 9), min_train_tokens=64, start_train_token=700, epochs="repeat")
    late = "the train split of local/second is too short: from token 700 on there is no sequence"
    shop.attempt(run="late").refuses(late)
    shop.add_run("short", dataset=mixture(1, 9), min_train_tokens=64 * 20)
    shop.attempt(run="short").refuses("the train split of local/first + local/second is too short: in 1 epoch, ")


@pytest.mark.slow
def test_other_commands_take_a_run_on_a_mixture(shop: InProcess, mixed: Path) -> None:
    where = (str(shop.datasets), "mixed", "--runs-dir", str(shop.runs))
    both = shop.script("test_loss.py", *where).stdout.split("\n\n")
    alone = [shop.script("test_loss.py", *where, "--dataset", name).stdout for name in NAMES]
    assert [each.strip() for each in both] == [each.strip() for each in alone]
    publishing = ("publish", "mixed", "me/mixed", "--card", "--datasets-dir", str(shop.datasets))
    card = shop.script("convert_hf.py", *publishing, "--runs-dir", str(shop.runs)).stdout
    assert all(f"`{name}`, test split" in card for name in NAMES)
    for name, change in (("again", "random_seed=7"), ("faster", "learning_rate=0.01")):
        shop.script("derive_run.py", "mixed", name, "--set", change, "--runs-dir", str(shop.runs))
        shop.train_here(name)
    said = shop.script("compare_runs.py", "mixed", "again", "faster", "--baseline", "mixed").stdout
    assert "(of the initial weights, the order of the data and dropout)" in " ".join(said.split())


def test_a_derived_run_fits_a_mixture(shop: InProcess) -> None:
    """The base asks for another vocabulary, more tokens and more validation sequences than the two datasets have."""
    shop.add_run("wants-more", min_train_tokens=64 * 30, validation_batches=None, validation_sequences=100)
    for name in NAMES:
        (shop.datasets / name / "meta.json").write_text(json.dumps({"vocab_size": 300}))
    setting = f"dataset={json.dumps(mixture(0.5, 0.5))}"
    asked = ("wants-more", "fits", "--set", setting, "--datasets-dir", str(shop.datasets), "--runs-dir", str(shop.runs))
    changed = {
        line.split(":")[0].strip(): line.split("-> ")[1]
        for line in shop.script("derive_run.py", *asked).stdout.splitlines()[1:]
    }
    # 62 and 37 windows to train on: the smaller dataset ends first. 31 windows of each to validate on.
    assert changed.pop("min_train_tokens") == "-1"
    assert (changed.pop("vocab_size"), changed.pop("validation_sequences")) == ("300", "62")
    assert [*changed] == ["dataset"]
    shop.train_here("fits")
    summary = summary_of(shop.runs / "fits")
    assert summary["epochs"]["local/second"] <= 1 < summary["epochs"]["local/second"] + 4 / 37
