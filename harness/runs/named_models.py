"""Models as a command line names them: two files, or a run and its checkpoint. Without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.common.errors import UserError
from harness.common.messages import as_unicode
from harness.model.tensor_names import WEIGHTS
from harness.runs.checkpoint_lookup import BEST, LATEST, find_checkpoint
from harness.runs.directory import RunDirectory


@dataclass(frozen=True)
class NamedModel:
    """A model's files, and what a table calls it."""

    label: str
    model_json: Path
    weights: Path

    @property
    def files(self) -> tuple[Path, Path]:
        """The files themselves, wherever links to them lie: two models with the same are one."""
        return Path(os.path.realpath(self.model_json)), Path(os.path.realpath(self.weights))


def models_of_files(files: Sequence[Path]) -> Iterator[NamedModel]:
    """The models of MODEL_JSON MODEL_SAFETENSORS MODEL_JSON MODEL_SAFETENSORS … Raises UserError for half a pair."""
    if len(files) % 2:
        raise UserError(f"{files[-1]}: a model is two files, MODEL_JSON MODEL_SAFETENSORS; give both, or --run RUN")
    for model_json, weights in zip(files[::2], files[1::2], strict=True):
        yield NamedModel(as_unicode(_label(weights)), model_json, weights)


def _label(weights: Path) -> str:
    """RUN:CHECKPOINT as far as the path has both, else the path."""
    folder = Path(os.path.abspath(weights)).parent
    if folder.parent.name == "checkpoints" and weights.name == WEIGHTS:
        return f"{folder.parent.parent.name}:{folder.name}"
    return str(weights)


def each_once(models: Sequence[NamedModel]) -> list[NamedModel]:
    """Without those that were named twice; different models that would be called alike are called by their paths."""
    files: dict[str, set[tuple[Path, Path]]] = {}
    for model in models:
        files.setdefault(model.label, set()).add(model.files)
    told = [model if len(files[model.label]) == 1 else replace(model, label=str(model.weights)) for model in models]
    return list({(model.label, model.files): model for model in told}.values())


def models_of_runs(runs_dir: Path, text: str) -> list[NamedModel]:
    """The models of RUN or RUN:CHECKPOINT, where RUN may be a pattern like `lr-*`: without a checkpoint `best`, or
    `latest` where there is no best, or the weights beside model.json of an imported model.

    Raises UserError for a run or checkpoint that is not there, or a run without a model yet.
    """
    name, colon, checkpoint = text.rpartition(":")
    runs = RunDirectory.find_all(runs_dir, name if colon else text)
    return [_model_of(run, checkpoint if colon else None) for run in runs]


def _model_of(run: RunDirectory, checkpoint: str | None) -> NamedModel:
    name = run.path.name
    if checkpoint is not None:
        weights = find_checkpoint(run.checkpoints, checkpoint) / WEIGHTS
        return NamedModel(f"{name}:{checkpoint}", run.model_json, weights)
    for link in (BEST, LATEST):
        if (run.checkpoints / link).is_dir():
            return NamedModel(name, run.model_json, run.checkpoints / link / WEIGHTS)
    if (run.path / WEIGHTS).is_file() and not run.train_json.exists():  # there it may be what a run starts from
        return NamedModel(name, run.model_json, run.path / WEIGHTS)
    raise UserError(f"{run.checkpoints}: no best or latest checkpoint; train the run, or name another: RUN:CHECKPOINT")
