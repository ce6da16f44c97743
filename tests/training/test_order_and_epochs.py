"""Shuffled windows, several passes over the train split, seeds of their own, and validation in sequences, through the
real command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.in_process import InProcess, module_shop
from tests.support.launch import metrics, summary_of, weights_of
from tests.support.same_end import assert_same_end

CONTEXT, BATCH_TOKENS = 16, 64  # of tests/support/launch.py, on one rank
SHORT: dict[str, Any] = {"min_train_tokens": 40 * BATCH_TOKENS, "report_interval": 10, "learning_rate": 0.01}


shop = module_shop(tokens=1000)  # 62 windows in train, which are 992 tokens, and some tokens that no window has


def are_equal(one: Path, other: Path) -> bool:
    return weights_of(one) == weights_of(other)


def validation_losses(run: Path) -> list[float]:
    return [event["loss"] for event in metrics(run, "validation")]


def test_passes_in_order_are_the_split_again_and_again(shop: InProcess) -> None:
    """Three passes over a split train as one pass does over the same text three times."""
    once = shop.add_dataset("local/once", tokens=20 * CONTEXT + 1)
    thrice = shop.add_dataset("local/thrice", tokens=20 * CONTEXT + 1)
    tokens = load_file(once / "train.safetensors")["tokens"]
    tokens[-1] = tokens[0]  # so that the last target of a pass is the first token of the next one
    save_file({"tokens": tokens}, once / "train.safetensors")
    save_file({"tokens": np.concatenate([tokens[:-1]] * 3 + [tokens[-1:]])}, thrice / "train.safetensors")
    runs = [
        shop.add_run("once", dataset="local/once", min_train_tokens=-1, epochs=3),
        shop.add_run("thrice", dataset="local/thrice", min_train_tokens=-1),
    ]
    for run in runs:
        shop.train_here(run.name)
    assert summary_of(runs[0])["tokens_seen"] == 60 * CONTEXT
    assert are_equal(*runs)


@pytest.mark.slow
def test_the_number_of_passes_is_told_and_recorded(shop: InProcess) -> None:
    run = shop.add_run("told", **SHORT, shuffle=True, epochs="repeat")
    said = "2.58 passes over 992 tokens, in random order (seed 42)"
    assert said in shop.train_here("told", "--plan").stdout
    printed = shop.train_here("told").stdout
    assert f"epochs: {said}" in printed
    assert "Epochs: 2.58 of local/letters" in printed
    assert summary_of(run)["epochs"] == {"local/letters": 2.5806}
    reports = metrics(run, "train")
    for event in reports:
        assert event["epochs"] == {"local/letters": round(event["tokens_seen"] / 992, 4)}
    shop.add_run("plain", min_train_tokens=256)
    shop.train_here("plain")
    table = json.loads(shop.script("compare_runs.py", "told", "plain", "--json").stdout)
    passes = {run["name"]: run["values"]["epochs"]["value"] for run in table["runs"]}
    assert passes == pytest.approx({"told": 2560 / 992, "plain": 256 / 992})
    assert "epochs" not in metrics(shop.runs / "plain")[0], "runs without the key have the files of earlier versions"
    assert "epochs" not in summary_of(shop.runs / "plain")


@pytest.mark.slow
def test_the_order_is_decided_by_its_seed_alone(shop: InProcess) -> None:
    keys: list[dict[str, Any]] = [
        {"shuffle": True, "random_seed": 3},
        {"shuffle": True, "random_seed": 3, "data_seed": 3},
        {"shuffle": True, "random_seed": 3, "data_seed": 4},
        {"shuffle": False, "random_seed": 3},
    ]
    runs = [shop.add_run(f"order-{number}", min_train_tokens=640, **each) for number, each in enumerate(keys)]
    for run in runs:
        shop.train_here(run.name)
    assert are_equal(runs[0], runs[1])
    for one, other in ((0, 2), (0, 3), (2, 3)):
        assert not are_equal(runs[one], runs[other])


@pytest.mark.slow
def test_seeds_of_weights_and_dropout(shop: InProcess) -> None:
    def run(name: str, dropout: float, **seeds: int) -> Path:
        folder = shop.add_run(name, model={"drop_rate": dropout}, min_train_tokens=256, **seeds)
        shop.train_here(name)
        return folder

    without = run("a", 0.0, random_seed=2), run("b", 0.0, random_seed=1, init_seed=2), run("c", 0.0, random_seed=1)
    assert are_equal(*without[:2])
    assert not are_equal(*without[1:])
    dropped = run("d", 0.2, random_seed=9, init_seed=2), run("e", 0.2, random_seed=2, dropout_seed=9)
    assert are_equal(*dropped)
    assert not are_equal(dropped[0], run("f", 0.2, random_seed=2))


@pytest.mark.slow
def test_another_number_of_passes_changes_a_falling_rate(shop: InProcess) -> None:
    keys: dict[str, Any] = {"min_train_tokens": -1, "lr_schedule": "cosine"}
    for epochs in (None, 2.0):
        run = shop.add_run("again", **keys, epochs=epochs)
        shop.train_here("again")
    [change] = summary_of(run)["changed"]
    assert change.startswith("epochs: null -> 2.0 after global step ")


def test_what_cannot_be_continued_is_refused_by_name(shop: InProcess) -> None:
    begun = {"min_train_tokens": 256, "shuffle": True, "epochs": 1}
    shop.add_run("begun", **begun)
    shop.train_here("begun")
    changes: list[tuple[str, Any]] = [("shuffle", False), ("data_seed", 1), ("random_seed", 1), ("init_seed", 1)]
    for key, value in [*changes, ("dropout_seed", 1)]:
        shop.add_run("begun", **begun | {"min_train_tokens": 512, key: value})
        assert f'made with "{key}": ' in shop.train_here("begun", expect=2).stderr
    run = shop.add_run("begun", **begun | {"min_train_tokens": 1280, "epochs": "repeat"})
    shop.train_here("begun")
    straight = shop.add_run("straight", **begun | {"min_train_tokens": 1280, "epochs": 2})
    shop.train_here("straight")
    assert are_equal(run, straight)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {},
            [
                "wanted 2,561 tokens, but there are 1,000; lower min_train_tokens",
                'allow more passes over it with "epochs"',
            ],
        ),
        ({"epochs": 2}, ["in 2 epochs", "wanted 2,561 tokens, but there are 1,985"]),
        ({"epochs": 0.01}, ["there are 1;"]),
        ({"epochs": "repeat", "start_train_token": 990}, ["from token 990 on there is no sequence of 16 tokens"]),
    ],
    ids=str,
)
def test_too_few_passes_are_refused(shop: InProcess, keys: dict[str, Any], words: list[str]) -> None:
    shop.add_run("short", **SHORT | keys)
    for arguments in ([], ["--plan"]):
        shop.attempt(*arguments, run="short").refuses("the train split of local/letters is too short", *words)


@pytest.mark.slow
def test_validation_does_not_depend_on_the_microbatch(shop: InProcess) -> None:
    """Seven sequences in microbatches of one, two, three and eight, by one rank or by two, give one loss."""
    losses = []
    for size in (1, 2, 3, 8):
        keys: dict[str, Any] = {"microbatch_size": size, "gradient_accumulation_steps": None, "global_batch_size": 24}
        keys |= {"validation_batches": None, "validation_sequences": 7, "precision": "fp32"}
        run = shop.add_run(f"of-{size}", model={"drop_rate": 0.0}, min_train_tokens=384, **keys)
        shop.train_here(run.name)
        losses.append(validation_losses(run)[0])
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    for ranks in ("rank0", "all"):
        keys = {"validation_ranks": ranks, "validation_batches": None, "validation_sequences": 7}
        shop.add_run(ranks, **keys, min_train_tokens=256)
        shop.train(ranks, ranks=2)
    assert_same_end(shop.runs / "rank0", shop.runs / "all")
    for name, keys in (("batches", {"validation_batches": 3}), ("sequences", {"validation_sequences": 6})):
        shop.add_run(name, **{"validation_batches": None} | keys, min_train_tokens=256)
        shop.train_here(name)
    assert validation_losses(shop.runs / "batches") == validation_losses(shop.runs / "sequences")
