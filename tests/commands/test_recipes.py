"""The commands of docs/recipes.md, on datasets of their form that a Hub on this machine has."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.data.tokenizers import train_bpe
from tests.support.fake_hub import FakeHub
from tests.support.in_process import InProcess
from tests.support.isolation import ROOT
from tests.support.preparing import Preparer, held_documents, parquet, texts

DOCUMENTS = texts(12_000)
# The files of the datasets, and which of them the recipe reads.
FILES = {
    "HuggingFaceFW/fineweb-edu": (["sample/10BT/000_00000.parquet", "sample/100BT/000_00000.parquet"], 1),
    "HuggingFaceFW/fineweb": (["sample/10BT/000_00000.parquet", "data/CC-MAIN-2024-10/000_00000.parquet"], 1),
    "karpathy/climbmix-400b-shuffle": (["shard_00000.parquet", "shard_00169.parquet", "shard_00170.parquet"], 2),
}


def commands() -> list[list[str]]:
    """Return the words of each command in the recipes."""
    text = re.sub(r" \\\n\s+", " ", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"))
    return [shlex.split(line)[2:] for line in re.findall(r"^    (uv run .*)$", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """A folder with the datasets that the recipes prepare and the runs that they derive. The text is a few hundred
    documents, and in place of GPT-2's vocabulary, which is not on every machine, there is a smaller one."""
    shop = InProcess(tmp_path_factory.mktemp("recipes"))
    shop.add_shipped_run("gpt2-124m")
    train_bpe(iter(DOCUMENTS), 300, shop.path / "tokenizer.json")
    with FakeHub() as hub:
        preparer = Preparer(shop.path, hub.environment(shop.path / "hf"))
        for name, (paths, _) in FILES.items():
            hub.add_dataset(name, {path: parquet(DOCUMENTS[at::4]) for at, path in enumerate(paths)})
        for script, *arguments in commands():
            if script == "prepare_datasets.py":
                trains = "--train-tokenizer" in arguments
                if trains:
                    arguments[arguments.index("--train-tokenizer") + 1] = "300"
                preparer.run(*arguments, *([] if trains else ["--tokenizer", "tokenizer.json"]))
            elif script == "derive_run.py":
                shop.script(script, *arguments)
        yield shop


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), [*zip(FILES, ("fineweb-edu", "fineweb", "climbmix"), strict=True)])
def test_the_files_that_a_recipe_names_are_read(shop: InProcess, name: str, target: str) -> None:
    _, count = FILES[name]
    expected = [text for at in range(count) for text in DOCUMENTS[at::4]]
    assert sorted(held_documents(shop.datasets / "me" / target)) == sorted(expected)
    assert not list((shop.datasets / "me").rglob("*.parquet"))


@pytest.mark.slow
def test_derived_runs_can_be_planned(shop: InProcess) -> None:
    for name, dataset, length in (("edu", "me/fineweb-edu", 1024), ("climb", "me/climbmix", 2048)):
        train, model = (json.loads((shop.runs / name / f"{file}.json").read_text()) for file in ("train", "model"))
        assert (train["dataset"], model["vocab_size"], model["context_length"]) == (dataset, 300, length)
        plan = shop.command("ddp_train.py", name, "datasets", "--plan")
        assert plan.status == 0, plan.stderr
    mixed = json.loads((shop.runs / "mixed" / "train.json").read_text())
    assert [source["weight"] for source in mixed["dataset"]] == [0.8, 0.2]


def test_the_sweep_changes_one_thing_in_each_run(tmp_path: Path) -> None:
    shop = InProcess(tmp_path)
    base = shop.add_shipped_run("8xa100m40")
    shop.script("sweep_runs.py", "make", str(ROOT / "sweeps" / "notebook.json"), "--runs-dir", str(shop.runs))
    settings = {}
    for run in sorted(shop.runs.glob("notebook-*")):
        both = [json.loads((run / f"{file}.json").read_text()) for file in ("model", "train")]
        settings[run.name.removeprefix("notebook-")] = {**both[0], **both[1]}
    baseline = settings.pop("baseline")
    assert {key: value for key, value in baseline.items() if key != "random_seed"} == {
        **json.loads((base / "model.json").read_text()),
        **json.loads((base / "train.json").read_text()),
    }
    assert len(settings) == 8
    for name, own in settings.items():
        changed = {key for key in own if own[key] != baseline.get(key)}
        assert len(changed) == 1 or name == "cosine", (name, changed)
