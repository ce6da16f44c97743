"""Rows of compare_runs.py for models that were not trained here: imported ones, and published figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hf.test_convert_hf import small, write_checkpoint
from tests.support.in_process import InProcess

PUBLISHED = {
    "source": "A paper",
    "machine": "a machine",
    "device": "TPU",
    "gpus": 8,
    "memory_gib": 16.0,
    "figures": {"test_loss": {"value": 3.5, "unit": "nats/token", "place": "Table 3"}},
}


@pytest.fixture
def shop(tmp_path: Path) -> InProcess:
    """A dataset, the imported model "guest" whose test loss on it was measured, and the published figures "paper"."""
    shop = InProcess(tmp_path)
    write_checkpoint(tmp_path / "c", small())
    shop.script("convert_hf.py", "export", str(tmp_path / "c"), str(tmp_path / "hf"))
    shop.script("convert_hf.py", "import", str(tmp_path / "hf"), "guest")
    data = shop.add_dataset(tokens=2000)
    tokenizer = shop.runs / "guest" / "tokenizer.json"
    (data / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (data / "meta.json").write_text(json.dumps({"tokenizer": "tokenizer.json"}))
    shop.script("test_loss.py", str(shop.datasets), "guest", "--dataset", "local/letters")
    (shop.runs / "paper").mkdir()
    (shop.runs / "paper" / "reported.json").write_text(json.dumps(PUBLISHED))
    return shop


def test_measured_and_published_numbers_are_shown_beside_those_of_runs(shop: InProcess) -> None:
    shop.add_run("mine", min_train_tokens=128)
    said = json.loads(shop.script("compare_runs.py", "--json").stdout)
    rows = {run["name"]: run["values"] for run in said["runs"]}
    assert rows["guest"]["state"]["value"] == rows["paper"]["state"]["value"] == "not trained here"
    (result,) = (shop.runs / "guest" / "results").glob("*.json")
    assert rows["guest"]["test_loss"]["value"] == json.loads(result.read_text())["loss"]
    assert rows["guest"]["parameters"]["value"] == small().parameters
    assert rows["paper"]["reported_test_loss"]["value"] == 3.5
    assert rows["paper"]["test_loss"]["value"] is None
    table = shop.script("compare_runs.py", "guest", "paper").stdout
    assert "of checkpoint" not in table, "it has only one"
    assert "damaged" not in table


def test_no_verdict_is_made_on_them(shop: InProcess) -> None:
    shop.add_dataset("local/own")
    shop.add_run("mine", dataset="local/own", min_train_tokens=128)
    shop.train_here("mine")
    said = " ".join(shop.script("compare_runs.py", "mine", "guest", "paper", "--baseline", "mine").stdout.split())
    assert "guest, paper: not trained here, and so in no comparison" in said


def test_a_damaged_file_of_published_figures_is_named(shop: InProcess) -> None:
    (shop.runs / "paper" / "reported.json").write_text("{}")
    said = json.loads(shop.script("compare_runs.py", "guest", "paper", "--json").stdout)
    state = {run["name"]: run["values"]["state"] for run in said["runs"]}
    assert (state["guest"]["value"], state["paper"]["value"]) == ("not trained here", "damaged")
    table = shop.script("compare_runs.py", "guest", "paper").stdout
    assert 'reported.json: key "source": missing' in " ".join(table.split())


def test_other_machines_need_a_training(shop: InProcess) -> None:
    said = " ".join(shop.script("compare_runs.py", "paper", "--machines").stdout.split())
    assert "paper on other machines: inconclusive, because it has no train.json" in said
