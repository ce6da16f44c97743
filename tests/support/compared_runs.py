"""Folders of runs that were never trained, with the files that training and the evaluation commands would have
written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from harness.comparison.records import RunRecord
from harness.comparison.table import RunsTable
from harness.model.config import ModelConfig
from harness.runs.checkpoint_meta import CheckpointMeta, write_meta
from harness.runs.directory import RunDirectory
from harness.runs.metrics import BenchmarkEvent, MetricsFile, TrainEvent, ValidationEvent
from harness.runs.results import LossResult, MeasuredWeights, Text, write_loss
from harness.runs.train_config import TrainConfig
from tests.support import launch

MODEL: dict[str, Any] = {**launch.MODEL, "emb_dim": 32, "drop_rate": 0.0, "qkv_bias": False}
TRAIN: dict[str, Any] = {
    "dataset": "me/texts",
    "microbatch_size": 4,
    "min_train_tokens": 12_800,
    "start_train_token": 0,
    "validation_interval": 10,
    "validation_batches": 5,
    "start_val_token": 0,
    "price_per_hour": 36.0,
}
DATASET: dict[str, Any] = {
    "name": "me/texts",
    "train": {"tokens": 100_000, "sha256": "aa" * 32},
    "validation": {"tokens": 10_000, "sha256": "bb" * 32},
}
TEXT = Text(
    dataset="me/texts",
    sha256="cc" * 32,
    tokenizer="gpt2",
    split="test",
    start_token=0,
    windows=40,
    context_length=16,
)
BEST, LATEST = "20260102Z030405-iteration-80", "20260102Z030406-iteration-99"


class RunFolder:
    """Folder of a run in `runs_dir`. Tests add the files of a run that has finished, stopped or been evaluated."""

    def __init__(self, runs_dir: Path, name: str, train: dict[str, Any] | None = None, **model: Any) -> None:
        self.directory = RunDirectory(runs_dir / name)
        self.path = self.directory.path
        self.path.mkdir(parents=True)
        self.model, self.train = {**MODEL, **model}, {**TRAIN, **(train or {})}
        self.directory.model_json.write_text(json.dumps(self.model))
        self.directory.train_json.write_text(json.dumps(self.train))

    def provenance(self) -> dict[str, Any]:
        """Return what summaries and checkpoints say alike."""
        model = ModelConfig.model_validate(self.model)
        train = TrainConfig.model_validate(self.train)
        return {
            "model": model.model_dump(mode="json"),
            "parameters": model.parameters,
            "train": train.model_dump(mode="json"),
            "dataset": DATASET,
            "device": "NVIDIA H100",
            "world_size": 2,
            "microbatch_size": 4,
            "accumulation_steps": 1,
            "torch": "2.15.0",
        }

    def finish(self, **values: Any) -> RunFolder:
        """Write the run's summary: 100 steps of 128 tokens (2 ranks x 4 sequences x 16 tokens) in 360 s, of which 60 s
        are validation."""
        summary: dict[str, Any] = {
            "run": self.path.name,
            "seconds": {"setup": 20.0, "training": 256.0, "validation": 60.0, "checkpointing": 24.0, "total": 360.0},
            "tokens_seen": 12_800,
            "trained_tokens": 12_800,
            "tokens_per_second": 50.0,
            "global_steps": 100,
            "final_train_loss": 2.5,
            "final_validation_loss": 2.6,
            "best_loss": 2.6,
            "best_step": 80,
            "mfu": 0.25,
            "peak_memory_gib": 1.5,
            **self.provenance(),
            **values,
        }
        self.directory.summary.write_text(json.dumps(summary))
        return self

    def add_checkpoint(self, name: str, *links: str, **values: Any) -> RunFolder:
        folder = self.directory.checkpoints / name
        folder.mkdir(parents=True)
        own: dict[str, Any] = {
            "global_step": int(name.rpartition("-")[2]),
            "seconds": {"setup": 10.0, "training": 100.0},
            **self.provenance(),
            **values,
        }
        write_meta(folder, CheckpointMeta.model_validate(own))
        for link in links:
            (self.directory.checkpoints / link).symlink_to(name)
        return self

    def train_to(self, *steps: int) -> RunFolder:
        """Append a training loss and a validation loss to metrics.jsonl for each step."""
        metrics = MetricsFile(self.directory.metrics)
        for step in steps:
            place: dict[str, Any] = {"global_step": step, "tokens_seen": (step + 1) * 128, "seconds": 3.6 * step}
            metrics.append(TrainEvent(**place, loss=4 - step / 100, tokens_per_second=40.0))
            metrics.append(ValidationEvent(**place, loss=4.1 - step / 100))
        return self

    def benchmark_at(self, step: int, examples: int, **values: float | None) -> RunFolder:
        """Append the accuracy of each task after a step to metrics.jsonl."""
        metrics = MetricsFile(self.directory.metrics)
        for task, value in values.items():
            score: dict[str, Any] = {"task": task, "metric": "acc", "value": value, "stderr": 0.0123}
            metrics.append(BenchmarkEvent(global_step=step, tokens_seen=(step + 1) * 128, examples=examples, **score))
        return self

    def test_loss(self, loss: float | None, checkpoint: str = BEST, **changes: Any) -> RunFolder:
        """Write a result of test_loss.py in which every window has this loss. None stands for a loss that is not
        finite."""
        text = TEXT.model_copy(update={key: changes.pop(key) for key in [*changes] if key in Text.model_fields})
        weights = MeasuredWeights(
            checkpoint=checkpoint,
            sha256=f"{self.path.name}{checkpoint}",
            global_step=int(checkpoint.rpartition("-")[2]),
            is_best=changes.pop("is_best", checkpoint == BEST),
            is_latest=checkpoint == LATEST,
        )
        values: dict[str, Any] = {"precision": "fp32", "bits_per_byte": None if loss is None else loss / 2, **changes}
        measured: dict[str, Any] = {"date": "2026-01-03T00:00:00Z", "device": "CPU", "torch": "2.15.0"}
        result = LossResult(weights=weights, text=text, loss=loss, **measured, **values)
        write_loss(self.directory, result, np.full(text.windows, np.nan if loss is None else loss, np.float32))
        return self


def finished_run(runs_dir: Path, name: str, rate: float, seed: int = 1, loss: float | None = 2.6) -> RunFolder:
    """Return a run that has finished with this validation loss."""
    settings = {"learning_rate": rate, "random_seed": seed}
    return RunFolder(runs_dir, name, settings).finish(final_validation_loss=loss)


def diverged_run(runs_dir: Path, name: str, rate: float, seed: int = 1) -> RunFolder:
    """Return a run that was ended because it diverged."""
    run = RunFolder(runs_dir, name, {"learning_rate": rate, "random_seed": seed})
    return run.add_checkpoint(LATEST, "latest", has_diverged=True, tokens_seen=6400)


def low_and_hot(runs_dir: Path, low: float, hot: float, seeds: int = 2) -> list[RunFolder]:
    """Return the runs of two arms, "low" and then "hot", whose validation losses are a little more than these."""
    return [
        finished_run(runs_dir, f"{name}-seed{seed}", rate, seed, loss + seed / 100)
        for name, rate, loss in [("low", 0.001, low), ("hot", 0.01, hot)]
        for seed in range(1, seeds + 1)
    ]


def records(*runs: RunFolder) -> list[RunRecord]:
    return [RunRecord.read(run.directory) for run in runs]


def table_of(*runs: RunFolder) -> RunsTable:
    return RunsTable.of(records(*runs))
