"""README's first command and the commands after it, on a shortened copy of the shipped run: no network, no GPU, no
account."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.in_process import InProcess
from tests.support.isolation import ROOT
from tests.support.launch import Workshop, metrics

pytestmark = pytest.mark.slow


@pytest.fixture(name="shop")
def _shop(quickstart: Workshop) -> Workshop:
    return InProcess(quickstart.path)


def weights(shop: Workshop) -> list[str]:
    run = shop.runs / "quickstart"
    return [str(run / "model.json"), str(run / "checkpoints" / "best" / "model.safetensors")]


def test_it_learns_on_a_dataset_made_here(shop: Workshop) -> None:
    losses = [event["loss"] for event in metrics(shop.runs / "quickstart") if event["event"] == "validation"]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.5
    assert (shop.datasets / "builtin" / "python-stdlib" / "meta.json").is_file()


def test_the_checkpoint_brings_its_tokenizer(shop: Workshop, tmp_path: Path) -> None:
    """A checkpoint's own files are enough to continue a text, and the same seed gives the same text."""
    texts = [
        shop.script("test_smoke.py", *weights(shop), "--prompt", "import ", "--num-tokens", "12", "--seed", seed).stdout
        for seed in ("1", "1", "2")
    ]
    assert texts[0].startswith("import ")
    assert texts[0] == texts[1] != texts[2]
    model_json, file = weights(shop)
    shutil.copytree(Path(file).resolve().parent, tmp_path / "copied")
    (tmp_path / "copied" / "meta.json").unlink()
    copied = [model_json, str(tmp_path / "copied" / Path(file).name)]
    told = shop.script("test_smoke.py", *copied, "--prompt", "import ", "--num-tokens", "12", "--seed", "1")
    assert told.stdout == texts[0]


def test_loss_and_bits_per_byte_on_the_test_split(shop: Workshop) -> None:
    result = shop.script("test_loss.py", str(shop.datasets), *weights(shop))
    found = re.match(r"Loss on the test split: (\S+)\nBits per byte: (\S+)\n", result.stdout)
    assert found, result.stdout + result.stderr
    meta = json.loads((shop.datasets / "builtin" / "python-stdlib" / "meta.json").read_text())["splits"]["test"]
    expected = float(found[1]) / 0.6931472 * meta["tokens"] / meta["bytes"]
    assert float(found[2]) == pytest.approx(expected, rel=0.01)  # only meta's mean includes the incomplete batch


def test_the_full_quickstart_fits_the_dataset(shop: Workshop, tmp_path: Path) -> None:
    """The standard library of this Python has enough tokens for the whole shipped run, as the run's plan shows."""
    full = Workshop(tmp_path)
    full.add_shipped_run("quickstart")
    plan = shop.script("ddp_train.py", "quickstart", str(shop.datasets), "--plan", "--runs-dir", str(full.runs)).stdout
    assert re.search(r"global steps +600\n", plan), plan


# README's output of the quickstart run

OF_THE_MACHINE = re.compile(r"\b(bf16|fp32)\b|\d[\d,.]*")


def forms(text: str) -> set[str]:
    """Return a text's lines with N in place of numbers and of the precision, which depend on the machine."""
    return {OF_THE_MACHINE.sub("N", line.strip()) for line in text.splitlines()}


def shown(first: str, last: str) -> set[str]:
    """Return README's lines from `first` up to `last`, as `forms` changes them. Empty lines and lines with only "…" are
    left out."""
    readme = (ROOT / "README.md").read_text()
    start = readme.index(first)
    return forms(readme[start : readme.index(last, start)]) - {"…", ""}


def test_the_quickstarts_output(quickstart: Workshop) -> None:
    printed = forms((quickstart.path / "printed").read_text().replace(f"{quickstart.path}/", ""))
    for line in shown("    quickstart: starting", "![Training"):
        assert line in printed, line
