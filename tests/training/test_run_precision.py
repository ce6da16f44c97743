"""A run keeps the precision that it began in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.common.memory import MemoryLimit
from harness.data.dataset import Dataset
from harness.distributed.world import World
from harness.model import precision
from harness.planning.experiment import Experiment
from harness.runs.checkpoint_meta import CheckpointMeta
from harness.runs.directory import RunDirectory
from harness.runs.train_config import TrainConfig
from harness.training.batch_size_finder import MicrobatchSearcher
from harness.training.startup import choose_precision
from tests.support.launch import DATASET, Workshop

CPU = torch.device("cpu")
HERE = "x86_64 CPU"
SETTINGS: dict[str, Any] = {
    "dataset": "builtin/none",
    "microbatch_size": 1,
    "min_train_tokens": 1,
    "start_train_token": 0,
    "checkpoint_interval": 1,
}


def checkpoint(wanted: str = "auto", **values: Any) -> CheckpointMeta:
    return CheckpointMeta(global_step=3, train={"precision": wanted}, **values)


@pytest.mark.parametrize(
    ("now", "units", "meta", "expected"),
    [
        ("auto", True, None, "bf16"),
        ("auto", False, None, "fp32"),
        ("auto", False, checkpoint(device=HERE, precision="bf16"), "bf16"),  # begun on another processor
        ("auto", True, checkpoint(device=HERE, precision="fp32"), "fp32"),
        ("auto", True, checkpoint(device=HERE), "fp32"),  # earlier versions: always fp32 on the CPU
        ("auto", True, checkpoint(device="NVIDIA V100", precision="fp16"), "bf16"),  # another kind of device
        ("auto", True, checkpoint("fp32", device=HERE, precision="fp32"), "bf16"),  # train.json has changed
        ("fp32", True, checkpoint(device=HERE, precision="bf16"), "fp32"),
        ("auto", True, checkpoint(), "bf16"),  # the notebook's do not say where
    ],
)
def test_auto_keeps_what_the_run_began_in(
    monkeypatch: pytest.MonkeyPatch, now: str, units: bool, meta: CheckpointMeta | None, expected: str
) -> None:
    monkeypatch.setattr(precision, "has_fast_bf16", lambda: units)
    assert choose_precision(TrainConfig(**SETTINGS | {"precision": now}), CPU, meta) == expected


def test_a_run_says_and_records_its_precision(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.add_dataset()
    run = shop.add_run()
    name = precision.Precision.for_training("auto", CPU).name
    assert f"1 x cpu, {name}, " in shop.train(ranks=1).stdout
    meta = json.loads((run / "checkpoints" / "latest" / "meta.json").read_text())
    assert (meta["precision"], meta["train"]["precision"]) == (name, "auto")


def test_a_gpu_that_does_not_compute_what_the_run_began_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" does not refuse itself."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla V100")
    began = checkpoint(device="NVIDIA A100", precision="bf16")
    assert choose_precision(TrainConfig(**SETTINGS), torch.device("cuda", 0), began) == "fp16"


def test_a_search_is_done_in_what_the_run_began_in(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.add_dataset()
    run = shop.add_run(precision="fp32")
    shop.train(ranks=1)
    (run / "train.json").write_text((run / "train.json").read_text().replace('"fp32"', '"auto"'))
    path = run / "checkpoints" / "latest" / "meta.json"
    meta = json.loads(path.read_text())
    meta["train"]["precision"] = "auto"  # as on a processor that is slow in bf16
    path.write_text(json.dumps(meta))
    experiment = Experiment.load(RunDirectory(run), shop.datasets)
    assert experiment.config.precision == "auto"
    search = MicrobatchSearcher(
        experiment, World(0, 0, 1, 1, CPU), Dataset.open(shop.datasets, DATASET), MemoryLimit(1.0, 2.0**30, "")
    )
    assert search._build_step().precision.name == "fp32"
