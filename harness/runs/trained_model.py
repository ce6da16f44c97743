"""Trained models on disk: how a command line names them, the files beside their weights, and the run that they belong
to. Imports torch only to write a model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError

from harness.common.errors import RunError, UserError, explained
from harness.common.files import atomic_folder, check_name, replace_text, sha256
from harness.common.json_files import parse_config, read_json_object
from harness.common.messages import as_unicode, tell
from harness.data.tokenizers import Tokenizer, load_tokenizer
from harness.model.config import ModelConfig
from harness.model.tensor_names import META, MODEL_JSON, WEIGHTS
from harness.runs.checkpoint_meta import read_meta
from harness.runs.checkpoints import BEST, LATEST, NoCheckpointError, find_checkpoint, list_checkpoints
from harness.runs.directory import CHECKPOINT_NAME, RunDirectory
from harness.runs.results import MeasuredWeights
from harness.runs.train_config import load_train_config

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS_SUFFIX = ".safetensors"
IMPORTED = "imported"  # the name, in results, of the weights that `convert_hf.py import` has written


@dataclass(frozen=True)
class TrainedModel:
    """The weights of a model, its configuration and its meta.json. The model may be a checkpoint, an imported model, or
    any other weights with a configuration."""

    label: str  # its name in tables
    weights: Path
    config: ModelConfig
    config_source: Path  # the file that the configuration was read from
    meta: dict[str, Any]  # the meta.json beside the weights; empty if there is none

    @classmethod
    def read(cls, path: Path, model_json: Path | None = None, label: str | None = None) -> TrainedModel:
        """Read the model of `path`, which is a weights file or its folder. The weights are not loaded, but verified if
        meta.json has their hash.

        - `model_json`: the configuration; None: that beside the weights, or else that of the run.
        - `label`: the model's name in tables; None: RUN:CHECKPOINT or the path of the weights.

        Raises UserError if the weights or a valid configuration are missing, or if the weights or meta.json are
        damaged. Raises OSError if the weights cannot be read.
        """
        weights = path / WEIGHTS if path.is_dir() else path
        if not weights.is_file():
            missing = f"no {WEIGHTS} in this folder; name another checkpoint" if path.is_dir() else "no such file"
            raise UserError(f"{path}: {missing}")
        named = folder = weights.parent
        if folder.is_symlink() and folder.resolve().parent == folder.parent.resolve():
            # `best` or `latest`, which training may point to another checkpoint while this one is measured
            folder = folder.parent / folder.resolve().name
            weights = folder / weights.name
        with explained(after="; name another checkpoint, or restore the file"):
            meta = read_json_object(folder / META) if (folder / META).is_file() else {}
        # A link such as `best` may be outside of the run's folder, but its target is inside.
        run = Path(folder.resolve()).parent.parent
        in_meta = [folder / META] if isinstance(meta.get("model"), dict) else []
        candidates = [folder / MODEL_JSON, *in_meta, run / MODEL_JSON]
        source = model_json or next((path for path in candidates if path.is_file()), None)
        if source is None and (folder / "config.json").is_file():
            raise UserError(
                f"{folder}: a model in transformers' format; give the run that it was exported from or, if it is a "
                f"GPT-2, make a run of it: convert_hf.py import {folder} RUN"
            )
        if source is None:
            raise UserError(
                f"{folder}: no model.json or meta.json describes the model of these weights; give MODEL_JSON WEIGHTS "
                "(for convert_hf.py, give --model-json)"
            )
        config = _config_in(source)
        if label is None:
            place = Path(os.path.abspath(named))
            is_in_run = place.parent.name == "checkpoints" and weights.name == WEIGHTS
            label = as_unicode(f"{place.parent.parent.name}:{place.name}" if is_in_run else str(named / weights.name))
        if not (folder / META).is_file() and CHECKPOINT_NAME.fullmatch(folder.name):
            tell(f"warning: {folder / META}: missing, so damage to the weights beside it would not be noticed")
        hashes = meta.get("sha256")
        if isinstance(hashes, dict) and hashes.get(weights.name) not in (None, sha256(weights)):
            raise UserError(f"{weights}: damaged (its SHA-256 is not the one in {META}); name another checkpoint")
        return cls(label, weights, config, source, meta)

    @property
    def run(self) -> RunDirectory | None:
        """The run directory that contains the weights or their checkpoint; None: there is none. Any folder with a
        model.json counts as a run directory."""
        found = _place_in_run(self.weights)
        run = RunDirectory((found.run.path if found else self.weights.parent).resolve())
        return run if run.model_json.is_file() else None

    @property
    def folder(self) -> Path:
        """Folder for files that commands make with the model. It is the run directory if the weights are in a run and
        the configuration is from meta.json. Else it is the folder of the configuration."""
        return self.run.path if self.run and self.config_source.name == META else self.config_source.parent

    @property
    def identity(self) -> tuple[str, str]:
        """The model's configuration as JSON, and the path of its weights with links resolved."""
        return self.config.model_dump_json(), os.path.realpath(self.weights)

    @property
    def tokenizer_file(self) -> str | Path:
        """The model's tokenizer: a file beside the weights, or "gpt2". Raises UserError if the name in meta.json is not
        a plain file name."""
        folder = self.weights.parent
        name = self.meta.get("tokenizer", "tokenizer.json" if (folder / "tokenizer.json").is_file() else "gpt2")
        return "gpt2" if name == "gpt2" else folder / check_name(str(name), f"{folder / META}: tokenizer")

    def tokenizer(self) -> Tokenizer:
        """Load and return the model's tokenizer. Raises UserError if it cannot be loaded."""
        return load_tokenizer(self.tokenizer_file)

    @property
    def dataset(self) -> str | None:
        """Name of the dataset that the model was trained on; None: not known. The names of a mixture's datasets are
        joined by " + ". Raises UserError if meta.json lacks the name and the run's train.json is not valid."""
        dataset = self.meta.get("dataset")
        if isinstance(dataset, dict) and "name" in dataset:
            return str(dataset["name"])
        found = _place_in_run(self.weights)
        return load_train_config(found.run.train_json).data_name if found and found.run.train_json.is_file() else None

    @property
    def datasets(self) -> list[str]:
        """Names of the datasets that the model was trained on; [] if not known. Raises UserError as `dataset` does."""
        return self.dataset.split(" + ") if self.dataset else []


def _config_in(source: Path) -> ModelConfig:
    """Read the model's configuration from a model.json, or from the key "model" of a meta.json."""
    raw = read_json_object(source)
    if source.name == META and isinstance(raw.get("model"), dict):
        raw = raw["model"]
    return parse_config(ModelConfig, raw, source)


def find_model(words: Sequence[str], runs_dir: Path) -> TrainedModel:
    """Return the one model that a command line names. Raises UserError for several, and the errors of `find_models`."""
    found = find_models(words, runs_dir)
    if len(found) > 1:
        raise UserError(f"{' '.join(words)}: {len(found)} models; give one, as RUN[:CHECKPOINT] or MODEL_JSON WEIGHTS")
    return found[0]


def find_models(words: Sequence[str], runs_dir: Path) -> list[TrainedModel]:
    """Return the models that a command line names. Each is RUN[:CHECKPOINT], MODEL_JSON WEIGHTS, a folder, or a weights
    file.

    - RUN may be a pattern like `lr-*`, or a run's path.
    - Without CHECKPOINT, the model is `best`, or else `latest`, or else the weights in a RUN without train.json.
    - Runs that match a pattern but lack the checkpoint are left out, with a line on standard error.

    Raises UserError if a model does not exist or is damaged, and OSError if its weights cannot be read.
    """
    found: list[TrainedModel] = []
    left = list(words)
    while left:
        word, path = left[0], Path(left.pop(0))
        following = left[0] if left else ""
        are_weights = word.endswith(WEIGHTS_SUFFIX) and not following.endswith(".json")
        # A path in `runs_dir` is always a run. A run elsewhere, without weights of its own, counts as a run so that
        # RunDirectory refuses it with an explanation.
        is_run = os.path.realpath(path.parent) == os.path.realpath(runs_dir)
        is_run |= path.name == word and (runs_dir / path).is_dir()
        is_run |= (path / "train.json").is_file() and not (path / WEIGHTS).exists()
        is_followed = following.endswith(WEIGHTS_SUFFIX) and "/" in word and not is_run
        is_model_json = word.endswith(".json") or path.is_file() or is_followed
        if is_model_json and not are_weights:
            if not left:
                raise UserError(f"{word}: a model is two files, MODEL_JSON WEIGHTS; give both, or RUN[:CHECKPOINT]")
            found.append(TrainedModel.read(Path(left.pop(0)), path))
        elif path.exists() and not is_run:
            found.append(TrainedModel.read(path))
        else:
            found += _models_of(runs_dir, *split_checkpoint(word))
    return found


def split_checkpoint(word: str) -> tuple[str, str | None]:
    """Split RUN[:CHECKPOINT] into the run and the checkpoint; None: no checkpoint is named. RUN may be a path."""
    name, colon, checkpoint = word.rpartition(":")
    return (name, checkpoint) if colon and "/" not in checkpoint else (word, None)


def _models_of(runs_dir: Path, name: str, checkpoint: str | None) -> list[TrainedModel]:
    """Return the models of the runs that match `name`, a name or a pattern."""
    found, missing = [], {}
    for run in RunDirectory.find_all(runs_dir, name):
        try:
            found.append(_model_of(run, checkpoint))
        except NoCheckpointError as error:
            missing[run.path.name] = error
    if missing and not found:
        raise next(iter(missing.values()))
    if missing:
        wanted = checkpoint or f"{BEST} or {LATEST}"
        tell(f"left out, because they have no {wanted} checkpoint: {', '.join(missing)}")
    return found


def _model_of(run: RunDirectory, checkpoint: str | None) -> TrainedModel:
    name = run.path.name
    if checkpoint is not None:
        return TrainedModel.read(find_checkpoint(run.checkpoints, checkpoint), label=f"{name}:{checkpoint}")
    for link in (BEST, LATEST):
        if (run.checkpoints / link).is_dir():
            model = TrainedModel.read(run.checkpoints / link, label=name)
            if link == BEST and model.meta.get("global_step") == 0:
                warning = f"its best checkpoint is that of step 0; to use its last checkpoint, give {name}:{LATEST}"
                tell(f"warning: {name}: {warning}")
            return model
    # If there is a train.json, the weights in the run's folder may be its initial weights.
    if (run.path / WEIGHTS).is_file() and not run.train_json.exists():
        return TrainedModel.read(run.path, label=name)
    remedy = "train the run, or name another checkpoint, as RUN:CHECKPOINT"
    if run.metrics.exists() and not list_checkpoints(run.checkpoints):
        remedy = "if the run trains elsewhere, fetch its checkpoints by mirror.py fetch (not with --without-weights)"
    raise NoCheckpointError(f"{run.checkpoints}: no best or latest checkpoint; {remedy}")


def each_once(models: Sequence[TrainedModel]) -> list[TrainedModel]:
    """Return the models, without those that repeat an earlier one under the same label. Different models with the same
    label get the paths of their weights as labels."""
    known: dict[str, set[tuple[str, str]]] = {}
    for model in models:
        known.setdefault(model.label, set()).add(model.identity)
    distinct = [model if len(known[model.label]) == 1 else replace(model, label=str(model.weights)) for model in models]
    return list({(model.label, model.identity): model for model in distinct}.values())


# Files beside the weights


def check_tokenizer_fits(tokenizer: Tokenizer, vocab_size: int, weights: Path) -> None:
    """Raise UserError if the tokenizer has more tokens than the model (`vocab_size`). The message names the folder of
    `weights`."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{weights.parent}: its tokenizer has {tokenizer.vocab_size:,} tokens, but the model only "
            f"{vocab_size:,}: this is another model's tokenizer; put the right tokenizer beside the weights, and its "
            f"file name into {META}"
        )


# Finding the run and the checkpoint of measured weights. Measurements are stored in the run's folder.


class ModelInRun(NamedTuple):
    """A run, and the name, hash and step of one of its checkpoints."""

    run: RunDirectory
    weights: MeasuredWeights


def model_in_run(weights: Path, config: ModelConfig | None = None) -> ModelInRun | None:
    """Return the run and the checkpoint that a weights file belongs to, or None. The checkpoint of an imported model is
    called IMPORTED. With `config`, also return None if the recorded configuration differs from it.

    Reads the whole file for its hash. Raises OSError if the file cannot be read. With `config`, raises UserError if no
    valid configuration is recorded.
    """
    found = _place_in_run(weights)
    if found is None or os.path.realpath(found.folder / WEIGHTS) != os.path.realpath(weights):
        return None
    run, folder = found
    if config is not None and config != _recorded_config(folder, run):
        return None
    if folder == run.path:
        own = MeasuredWeights(checkpoint=IMPORTED, sha256=sha256(weights), is_best=True, is_latest=True)
        return ModelInRun(run, own)
    facts: dict[str, Any] = {"checkpoint": folder.name, "sha256": sha256(weights)}
    with suppress(UserError):  # without a valid meta.json of a checkpoint, only the hash is recorded
        meta = read_meta(folder)
        facts |= {key: getattr(meta, key) for key in ("global_step", "tokens_seen") if key in meta.model_fields_set}
    for link in (BEST, LATEST):
        facts[f"is_{link}"] = os.path.realpath(folder.parent / link) == str(folder)
    return ModelInRun(run, MeasuredWeights(**facts))


def _recorded_config(folder: Path, run: RunDirectory) -> ModelConfig:
    """Return the configuration in a checkpoint's meta.json or, if that has no valid one, in the run's model.json."""
    with suppress(UserError):
        return _config_in(folder / META)
    return _config_in(run.model_json)


class _PlaceInRun(NamedTuple):
    run: RunDirectory
    folder: Path  # of the checkpoint, with links resolved


def _place_in_run(weights: Path) -> _PlaceInRun | None:
    """Return the run and the checkpoint's folder that contain this weights file, or None. An imported model's folder
    counts as both. The path may lead through links."""
    for path in (Path(os.path.abspath(weights)), Path(os.path.realpath(weights))):
        folder, checkpoints = Path(os.path.realpath(path.parent)), path.parent.parent
        run = RunDirectory(checkpoints.parent)
        is_there = run.checkpoints == checkpoints and folder.parent == Path(os.path.realpath(checkpoints))
        if is_there and run.model_json.is_file():
            return _PlaceInRun(run, folder)
        imported = RunDirectory(path.parent)
        if path.name == WEIGHTS and imported.model_json.is_file() and not imported.train_json.exists():
            with suppress(UserError, OSError):  # exported and fine-tuned models have the same files
                if "imported_from" in read_json_object(imported.path / META):
                    return _PlaceInRun(imported, imported.path)
    return None


def find_measured(run: RunDirectory, checkpoint: str, digest: str) -> ModelInRun | None:
    """Return the run's checkpoint of this name (IMPORTED: imported weights) if its weights have the SHA-256 `digest`,
    else None. Raises UserError if `checkpoint` is no valid name, and OSError if the weights cannot be read."""
    weights = run.checkpoints / check_name(checkpoint, "checkpoint") / WEIGHTS
    if checkpoint == IMPORTED:
        weights = run.path / WEIGHTS
    found = model_in_run(weights) if weights.is_file() else None
    return found if found is not None and found.weights.sha256 == digest else None


@contextmanager
def warned_if_not_kept() -> Iterator[None]:
    """Turn a UserError, RunError or OSError of the body into a warning that the result is not written to the run's
    results. The caller must print the result."""
    try:
        yield
    except (UserError, RunError, OSError) as error:
        tell(f"warning: the result is not written to the run's results: {error}")


# Writing a model


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a draft folder, which is renamed to `folder` after the body. If the body fails, the draft is removed.

    Raises UserError if `folder` is a link, a file, or not empty. Raises RunError if it cannot be written, or if the
    body raises OSError or SafetensorError.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(f"{folder}: exists; give another place, or move it away")
    try:
        with atomic_folder(folder) as draft:
            yield draft
    except (OSError, SafetensorError) as error:  # safetensors wraps a full disk in an exception of its own
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{folder}: cannot be written: {reason}") from None


def write_model(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, tokenizer: str | Path, facts: dict[str, Any]
) -> None:
    """Write a model to the new folder `folder`: model.json, weights, tokenizer and meta.json.

    - `config`: the contents of model.json.
    - `tensors`: the weights by their names in published checkpoints.
    - `tokenizer`: "gpt2", or a file to copy.
    - `facts`: more keys of meta.json.

    Raises UserError and RunError as `new_folder` does.
    """
    with new_folder(folder) as draft:
        if isinstance(tokenizer, Path):
            shutil.copyfile(tokenizer, draft / tokenizer.name)
        name = tokenizer.name if isinstance(tokenizer, Path) else tokenizer
        write_model_files(draft, config, tensors, tokenizer=name, **facts)


def write_model_files(draft: Path, config: dict[str, Any], tensors: dict[str, Tensor], **facts: Any) -> None:
    """Write model.json, model.safetensors and meta.json into the folder `draft`. meta.json has the configuration and
    `facts`. `tensors` are named as in published checkpoints, and may share memory. Raises OSError or SafetensorError if
    a file cannot be written."""
    from harness.model.weights import save_weights

    replace_text(draft / MODEL_JSON, json.dumps(config, indent=4) + "\n")
    # Cloned, because safetensors refuses tensors that share memory
    save_weights({name: tensor.clone() for name, tensor in tensors.items()}, draft / WEIGHTS)
    replace_text(draft / META, json.dumps({"model": config, **facts}, indent=2, allow_nan=False) + "\n")
