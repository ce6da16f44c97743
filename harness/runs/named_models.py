"""Trained models on disk, and how a command line names them. Without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.common.errors import UserError
from harness.common.json_files import parse_config, read_json_object
from harness.common.messages import as_unicode
from harness.model.config import ModelConfig
from harness.model.tensor_names import META, MODEL_JSON, WEIGHTS
from harness.runs.checkpoint_lookup import BEST, LATEST, find_checkpoint
from harness.runs.directory import RunDirectory

WEIGHTS_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class TrainedModel:
    """Weights, their configuration and what is known about them: a checkpoint of this program or the notebook's, an
    imported model, or the like."""

    label: str  # what a table calls it
    weights: Path
    config: ModelConfig
    config_source: Path  # the file that the configuration stands in
    meta: dict[str, Any]  # of the weights; empty if there is none

    @classmethod
    def read(cls, path: Path, model_json: Path | None = None, label: str | None = None) -> TrainedModel:
        """The model in a folder, or whose weights are the file `path`.

        Its configuration is in `model_json` or, if that is None, in a model.json beside the weights, in the
        checkpoint's meta.json, or in the run directory that the checkpoint lies in. Raises UserError if there is none.
        """
        weights = path / WEIGHTS if path.is_dir() else path
        if not weights.is_file():
            raise UserError(f"{path}: no {WEIGHTS} in this folder" if path.is_dir() else f"{path}: no such file")
        folder = weights.parent
        meta = read_json_object(folder / META) if (folder / META).is_file() else {}
        # A link (`best`) may stand outside its run; what it leads to lies in it.
        run = Path(folder.resolve()).parent.parent
        for candidate in [model_json] if model_json else [folder / MODEL_JSON, folder / META, run / MODEL_JSON]:
            if candidate.name == META and not isinstance(meta.get("model"), dict):
                continue
            if candidate.is_file() or model_json:
                raw = meta["model"] if candidate.name == META else read_json_object(candidate)
                config = parse_config(ModelConfig, raw, candidate)
                return cls(label or as_unicode(_label(weights)), weights, config, candidate, meta)
        if (folder / "config.json").is_file():
            raise UserError(
                f"{folder}: as transformers saves models; convert_hf.py import {folder} RUN makes a run of it"
            )
        raise UserError(
            f"{folder}: no model.json tells the shape of these weights; give MODEL_JSON WEIGHTS, or --model-json"
        )

    @property
    def run(self) -> RunDirectory | None:
        """The run directory that the checkpoint lies in, if it does."""
        folder = Path(self.weights.parent.resolve())
        run = RunDirectory(folder.parent.parent if folder.parent.name == "checkpoints" else folder)
        return run if run.model_json.is_file() else None

    @property
    def folder(self) -> Path:
        """The folder for what is made of the model: where its model.json lies."""
        return self.run.path if self.run and self.config_source.name == META else self.config_source.parent

    @property
    def identity(self) -> tuple[str, str]:
        """Shape and weights, wherever links to them lie: two models with the same are one."""
        return self.config.model_dump_json(), os.path.realpath(self.weights)


def _label(weights: Path) -> str:
    """RUN:CHECKPOINT as far as the path has both, else the path."""
    folder = Path(os.path.abspath(weights)).parent
    if folder.parent.name == "checkpoints" and weights.name == WEIGHTS:
        return f"{folder.parent.parent.name}:{folder.name}"
    return str(weights)


def find_model(words: Sequence[str], runs_dir: Path) -> TrainedModel:
    """The one model that a command line names. Raises UserError as `find_models` does, and if there are several."""
    found = find_models(words, runs_dir)
    if len(found) > 1:
        raise UserError(f"{' '.join(words)}: {len(found)} models; give one, as RUN[:CHECKPOINT] or MODEL_JSON WEIGHTS")
    return found[0]


def find_models(words: Sequence[str], runs_dir: Path) -> list[TrainedModel]:
    """The models of a command line, each named by RUN[:CHECKPOINT], by MODEL_JSON WEIGHTS, or by its folder.

    RUN may be a pattern like `lr-*`, and a run's path. Without a checkpoint it is `best`, or `latest` where there is no
    best, or the weights beside model.json of an imported model. Raises UserError, with the nearest name, for what is
    not there.
    """
    found: list[TrainedModel] = []
    left = list(words)
    while left:
        word, path = left[0], Path(left.pop(0))
        following = left[0] if left else ""
        are_weights = word.endswith(WEIGHTS_SUFFIX) and not following.endswith(".json")
        if not are_weights and (word.endswith(".json") or path.is_file() or following.endswith(WEIGHTS_SUFFIX)):
            if not left:
                raise UserError(f"{word}: a model is two files, MODEL_JSON WEIGHTS; give both, or RUN[:CHECKPOINT]")
            found.append(TrainedModel.read(Path(left.pop(0)), path))
        elif path.exists() and not _is_run(path, runs_dir):
            found.append(TrainedModel.read(path))
        else:
            name, colon, checkpoint = word.rpartition(":")
            runs = RunDirectory.find_all(runs_dir, name if colon else word)
            found += [_model_of(run, checkpoint if colon else None) for run in runs]
    return found


def _is_run(path: Path, runs_dir: Path) -> bool:
    """True if a name or path means a run rather than a folder with weights. One in `runs_dir` wins; a run elsewhere
    without weights of its own is left to RunDirectory, which refuses it."""
    is_in_runs_dir = os.path.realpath(path.parent) == os.path.realpath(runs_dir)
    is_name = path.name == str(path) and (runs_dir / path).is_dir()
    return is_in_runs_dir or is_name or ((path / "train.json").is_file() and not (path / WEIGHTS).exists())


def _model_of(run: RunDirectory, checkpoint: str | None) -> TrainedModel:
    name = run.path.name
    if checkpoint is not None:
        return TrainedModel.read(find_checkpoint(run.checkpoints, checkpoint), label=f"{name}:{checkpoint}")
    for link in (BEST, LATEST):
        if (run.checkpoints / link).is_dir():
            return TrainedModel.read(run.checkpoints / link, label=name)
    if (run.path / WEIGHTS).is_file() and not run.train_json.exists():  # there it may be what a run starts from
        return TrainedModel.read(run.path, label=name)
    raise UserError(f"{run.checkpoints}: no best or latest checkpoint; train the run, or name another: RUN:CHECKPOINT")


def each_once(models: Sequence[TrainedModel]) -> list[TrainedModel]:
    """Without those that were named twice; different models that would be called alike are called by their paths."""
    known: dict[str, set[tuple[str, str]]] = {}
    for model in models:
        known.setdefault(model.label, set()).add(model.identity)
    told = [model if len(known[model.label]) == 1 else replace(model, label=str(model.weights)) for model in models]
    return list({(model.label, model.identity): model for model in told}.values())
