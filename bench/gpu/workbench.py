"""Shared parts of the stages: paths, sizes, timing, a data set, run directories, and a trainer of one process."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.gpu.results import Results

if TYPE_CHECKING:
    from ddp_train import Trainer

DATASET = "local/zipf"
GPT2_SMALL = {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12, "n_layers": 12}
TINY = {"vocab_size": 512, "context_length": 32, "emb_dim": 32, "n_heads": 2, "n_layers": 2}
ZIPF_EXPONENT = 1.2
TOKENS = {False: {"train": 30_000_000, "validation": 4_000_000}, True: {"train": 60_000, "validation": 10_000}}


class MissingKeyError(Exception):
    """This version of the project has no such key in train.json."""


@dataclass(frozen=True)
class Workbench:
    """`tiny`: a rehearsal at shapes that a CPU computes in no time."""

    work: Path
    results: Results
    tiny: bool

    @property
    def shape(self) -> dict[str, int]:
        return TINY if self.tiny else GPT2_SMALL

    @property
    def datasets(self) -> Path:
        return self.work / "datasets"

    @property
    def runs(self) -> Path:
        return self.work / "runs"

    def make_data(self) -> Path:
        """A data set of tokens with Zipf's frequencies, as text has: some rows of the embedding get most gradients."""
        from safetensors.numpy import save_file

        folder = self.datasets / DATASET
        if not (folder / "meta.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            generator = np.random.default_rng(0)
            for split, count in TOKENS[self.tiny].items():
                tokens = np.minimum(generator.zipf(ZIPF_EXPONENT, count) - 1, self.shape["vocab_size"] - 1)
                save_file({"tokens": tokens.astype(np.uint16)}, folder / f"{split}.safetensors")
            (folder / "meta.json").write_text(json.dumps({"description": "Zipf", "token_dtype": "uint16"}))
        return self.datasets

    def add_run(self, name: str, model: dict[str, Any], train: dict[str, Any]) -> Path:
        """A run directory of this bench's shape, changed by `model` and `train`. Raises MissingKeyError."""
        from harness.runs.train_config import TrainConfig

        missing = train.keys() - TrainConfig.model_fields.keys()
        if missing:
            raise MissingKeyError(f"train.json has no key {', '.join(sorted(missing))}")
        base = {"dataset": DATASET, "min_train_tokens": 1, "start_train_token": 0, "checkpoint_interval": 1000}
        folder = self.runs / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.json").write_text(json.dumps({**self.shape, "drop_rate": 0.1, "qkv_bias": False, **model}))
        (folder / "train.json").write_text(json.dumps(base | train))
        return folder

    def build_trainer(self, name: str) -> Trainer:
        """Build the trainer of a run directory as ddp_train.py does, in this process alone and without a checkpoint."""
        from ddp_train import build_trainer
        from harness.data.dataset import Dataset
        from harness.distributed.signals import StopSignal
        from harness.distributed.world import World
        from harness.planning.experiment import Experiment, Position
        from harness.runs.directory import RunDirectory
        from harness.training.startup import Clock, PreparedRun

        experiment = Experiment.load(RunDirectory.find(self.runs, name), self.make_data())
        dataset = Dataset.open(self.datasets, DATASET)
        prepared = PreparedRun(experiment, dataset, experiment.layout(1), Position(0, 2**40, 0, 0), Clock())
        return build_trainer(prepared, World(0, 0, 1, 1, device()), StopSignal())

    def milliseconds(self, work: Callable[[], object], repeat: int = 20, warm: int = 3) -> float:
        """Median time of `work` in milliseconds, after enough calls for compilation and the choice of kernels."""
        for _ in range(warm):
            work()
        times = []
        for _ in range(2 if self.tiny else repeat):
            synchronize()
            began = time.perf_counter()
            work()
            synchronize()
            times.append(1000 * (time.perf_counter() - began))
        return statistics.median(times)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def use_attention(backend: str) -> None:
    """Let scaled_dot_product_attention use one of its CUDA kernels only; "default": whichever it prefers."""
    if backend != "default":
        torch.backends.cuda.enable_cudnn_sdp(backend == "cudnn")
        torch.backends.cuda.enable_flash_sdp(backend == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(backend == "efficient")
        torch.backends.cuda.enable_math_sdp(not torch.cuda.is_available())
