"""Every precision trains a small run to the same validation loss, and a run keeps the precision that it began with.

The loss falls from 4.16 to 1.66 nats. It must end within 0.003 nats of fp32's, less than half of the difference that
another random seed makes (0.007).
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.model import precision
from harness.planning.experiment import Experiment
from harness.runs.checkpoint_meta import CheckpointMeta
from harness.runs.directory import RunDirectory
from harness.runs.train_config import TrainConfig
from harness.training.batch_size_finder import MicrobatchSearcher, report_max_microbatch
from harness.training.startup import choose_precision
from tests.support.configs import SEED_TRAIN
from tests.support.in_process import InProcess, module_shop
from tests.support.launch import meta_of, summary_of

CPU = torch.device("cpu")
HERE = "x86_64 CPU"
TOLERANCE = 0.003  # nats of validation loss
STEPS: dict[str, Any] = {
    "gradient_accumulation_steps": None,
    "microbatch_size": 8,
    "min_train_tokens": None,
    "train_steps": 120,
    "learning_rate": 0.01,
    "lr_schedule": "linear",
    "warmup_steps": 10,
    "clipping_max_norm": 1.0,
    "validation_interval": 119,
    "report_interval": 40,
}


shop = module_shop(tokens=20_000)


def final_loss(shop: InProcess, name: str, **keys: Any) -> float:
    """Train a run with the given keys of train.json, check that it skipped no step, and return its last validation
    loss."""
    run = shop.add_run(name, model={"drop_rate": 0.0}, **STEPS, **keys)
    shop.train_here(name)
    summary = summary_of(run)
    meta = meta_of(run)
    assert (meta["precision"], summary["skipped_steps"]) == (keys["precision"], 0)
    assert (run / "checkpoints" / "latest" / "scaler.pt").exists() == (keys["precision"] == "fp16")
    return float(summary["final_validation_loss"])


@pytest.fixture(scope="module")
def fp32_loss(shop: InProcess) -> float:
    loss = final_loss(shop, "fp32", precision="fp32")
    assert math.log(4) < loss < 2, "the model has learned, and its loss is above the entropy of the text, log(4)"
    return loss


@pytest.mark.parametrize(
    "keys",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        pytest.param({"precision": "bf16", "residual_precision": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_trains_to_the_loss_of_fp32(shop: InProcess, fp32_loss: float, keys: dict[str, str]) -> None:
    loss = final_loss(shop, "-".join(keys.values()), **keys)
    assert loss == pytest.approx(fp32_loss, abs=TOLERANCE)
    assert loss != fp32_loss, "an equal loss would mean that the run was computed in fp32"


def checkpoint(wanted: str = "auto", **values: Any) -> CheckpointMeta:
    return CheckpointMeta(global_step=3, train={"precision": wanted}, **values)


@pytest.mark.parametrize(
    ("now", "units", "meta", "expected"),
    [
        ("auto", True, None, "bf16"),
        ("auto", False, None, "fp32"),
        ("auto", False, checkpoint(device=HERE, precision="bf16"), "bf16"),  # begun on a CPU with bf16 units
        ("auto", True, checkpoint(device=HERE, precision="fp32"), "fp32"),
        ("auto", True, checkpoint(device=HERE), "fp32"),  # by an earlier version, which always used fp32 on a CPU
        ("auto", True, checkpoint(device="NVIDIA V100", precision="fp16"), "bf16"),  # another kind of device
        ("auto", True, checkpoint("fp32", device=HERE, precision="fp32"), "bf16"),  # train.json has changed
        ("fp32", True, checkpoint(device=HERE, precision="bf16"), "fp32"),
        ("auto", True, checkpoint(), "bf16"),  # by the notebook's program, which records no device
        ("fp32", True, None, "fp32"),
    ],
)
def test_auto_keeps_what_the_run_began_in(
    monkeypatch: pytest.MonkeyPatch, now: str, units: bool, meta: CheckpointMeta | None, expected: str
) -> None:
    monkeypatch.setattr(precision, "has_fast_bf16", lambda: units)
    assert choose_precision(TrainConfig(**SEED_TRAIN | {"precision": now}), CPU, meta) == expected


def test_a_gpu_that_does_not_compute_what_the_run_began_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without bf16, "auto" resumes a bf16 run in fp16 instead of failing."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla V100")
    began = checkpoint(device="NVIDIA A100", precision="bf16")
    assert choose_precision(TrainConfig(**SEED_TRAIN), torch.device("cuda", 0), began) == "fp16"


def test_a_search_is_done_in_what_the_run_began_in(
    shop: InProcess, fp32_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "auto", the microbatch search uses the precision of the checkpoint, here fp32."""
    run = Path(shutil.copytree(shop.runs / "fp32", shop.runs / "begun", symlinks=True))
    (run / "train.json").write_text((run / "train.json").read_text().replace('"fp32"', '"auto"'))
    path = run / "checkpoints" / "latest" / "meta.json"
    meta = json.loads(path.read_text())
    meta["train"]["precision"] = "auto"
    path.write_text(json.dumps(meta))
    experiment = Experiment.load(RunDirectory(run), shop.datasets)
    assert experiment.config.precision == "auto"
    built: list[str] = []

    def find(self: MicrobatchSearcher, ceiling: int) -> int:
        built.append(self._build_step().precision.name)
        return 1

    monkeypatch.setattr(MicrobatchSearcher, "find", find)
    report_max_microbatch(experiment, None, write=False)
    assert built == ["fp32"]
