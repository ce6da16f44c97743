"""A model on disk: its weights, its shape, and what lies around them, wherever it was made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config import read_json_object
from harness.errors import UserError
from harness.weights import META

WEIGHTS, MODEL_JSON = "model.safetensors", "model.json"


@dataclass(frozen=True)
class ModelFiles:
    """A folder with weights: a checkpoint of this program or the notebook's, an imported model, or the like."""

    weights: Path
    shape: dict[str, Any]  # model.json's object
    shape_source: Path  # the file it stands in
    meta: dict[str, Any]  # of the weights; empty if there is none

    @classmethod
    def find(cls, path: Path, model_json: Path | None) -> ModelFiles:
        """The model in a folder, or whose weights are the file `path`.

        Its shape is in `model_json` or, if that is None, in a model.json beside the weights, in the checkpoint's
        meta.json, or in the run directory that the checkpoint lies in. Raises UserError if there is no such thing.
        """
        weights = path if path.suffix == ".safetensors" else path / WEIGHTS
        if not weights.is_file():
            what = "no such file" if path.suffix == ".safetensors" else f"no {WEIGHTS} in this folder"
            raise UserError(f"{path}: {what if path.exists() or weights is path else 'no such folder'}")
        folder = weights.parent
        meta = read_json_object(folder / META) if (folder / META).is_file() else {}
        # A link (`best`) may stand outside its run; what it leads to lies in it.
        run = Path(folder.resolve()).parent.parent
        for candidate in [model_json] if model_json else [folder / MODEL_JSON, folder / META, run / MODEL_JSON]:
            if candidate.name == META and not isinstance(meta.get("model"), dict):
                continue
            if candidate.is_file() or model_json:
                shape = meta["model"] if candidate.name == META else read_json_object(candidate)
                return cls(weights, shape, candidate, meta)
        if (folder / "config.json").is_file():
            raise UserError(
                f"{folder}: as transformers saves models; convert_hf.py import {folder} RUN makes a run of it"
            )
        raise UserError(f"{folder}: no model.json tells the shape of these weights; give it by --model-json")

    @property
    def run(self) -> Path | None:
        """The run directory that the checkpoint lies in, if it does."""
        folder = Path(self.weights.parent.resolve())
        run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
        return run if (run / MODEL_JSON).is_file() else None
