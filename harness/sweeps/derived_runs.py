"""Runs that are derived from another run: its model.json and train.json with some keys changed, and a derived.json with
the base run's name and the settings that differ, except `on_end` and `notify`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from harness.common.errors import RunError, UserError, explained
from harness.common.files import atomic_folder, check_name
from harness.common.json_files import parse_config, read_json_object
from harness.common.messages import abbreviated, nearest, quoted
from harness.common.other_names import advice
from harness.data.dataset import check_dataset_name, is_present
from harness.data.order import WindowOrder
from harness.data.training_data import TrainingData
from harness.mirror.store import check_url
from harness.model.config import ModelConfig, load_model_config
from harness.planning.experiment import Experiment, first_difference
from harness.runs.budget import COUNTABLE
from harness.runs.directory import RunDirectory
from harness.runs.train_config import ALTERNATIVES, BUDGETS, Affects, TrainConfig, keys_affecting, load_train_config
from harness.runs.upstream import SPELLINGS, translate_upstream

MODEL_KEYS = (*ModelConfig.model_fields, *ModelConfig.other_keys)
TRAIN_KEYS = tuple(TrainConfig.model_fields)
SHOWN_DIFFERENCES = 6
# Changes that turn validation off, for a dataset without a validation split.
NO_VALIDATION = dict.fromkeys(("validation_interval", "validation_sequences", "validation_batches", "start_val_token"))
PADDING = 128  # a model's vocab_size may be padded by fewer tokens than this, for speed

Changes = Mapping[str, JsonValue]


@dataclass(frozen=True)
class DerivedRun:
    """A run that is derived from another run, or the base of such runs. The folder need not exist yet."""

    directory: RunDirectory
    model: dict[str, Any]  # contents of model.json
    train: dict[str, Any]  # contents of train.json
    model_config: ModelConfig
    train_config: TrainConfig
    parent: str = ""  # name of the run from which this run was derived; "" for a base
    sweep: str | None = None  # name of the sweep to which the run belongs
    # Each setting in which this run differed from its parent when it was derived, as {"base": value in the parent,
    # "here": value in this run}.
    differs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.directory.path.name

    @property
    def settings(self) -> dict[str, Any]:
        """Settings in model.json and train.json, except `on_end` and `notify`, with defaults for missing keys."""
        return _settings(self.model_config, self.train_config)

    def settings_there(self) -> dict[str, Any]:
        """Return the settings in the run's folder, which training uses. Raises UserError if a file is damaged."""
        return _settings(load_model_config(self.directory.model_json), load_train_config(self.directory.train_json))

    def as_made(self) -> DerivedRun:
        """Return the run with the `train_config` of its folder's train.json, if that file exists: price_per_hour,
        max_hours or max_dollars may have been changed there. Raises UserError if the file is damaged."""
        path = self.directory.train_json
        return replace(self, train_config=load_train_config(path)) if path.is_file() else self

    def experiment(self, datasets_dir: Path) -> Experiment:
        return Experiment(self.directory, self.train_config, self.model_config, datasets_dir)

    def is_made(self) -> bool:
        """Return True if the run's folder exists, and False if nothing is at its path. In the folder, keys that affect
        no result may have other values, except `epochs`. Raises UserError if the path holds something else, such as
        another run, or if a file is damaged."""
        folder, files = self.directory.path, (self.directory.train_json, self.directory.model_json)
        other, remedy = "", 'move what is there away, or give the sweep another "name"'
        if not os.path.lexists(folder):
            return False
        if not all(os.path.lexists(path) for path in files):
            other = "is not a run (a folder with train.json and model.json)"
        else:
            there, config = self.settings_there(), self.train_config
            free = {*keys_affecting(Affects.NOTHING)} - {"epochs"}  # with min_train_tokens -1, epochs decide the length
            if self.as_made().train_config.sequences_per_validation == config.sequences_per_validation:
                free |= {"validation_sequences", "validation_batches"}  # two ways to give this number
            own = {key: value for key, value in self.settings.items() if key not in free}
            found = (first_difference({key: there.get(key)}, {key: value}) for key, value in own.items())
            if different := [each for each in found if each]:
                other = f"there is another run of this name ({abbreviated(different, SHOWN_DIFFERENCES)})"
                remedy = f"undo the change of the sweep or its base, {remedy}"
        if other:
            raise UserError(f"{folder}: {other}; {remedy}")
        return True

    def check_startable(self, train_tokens: Sequence[int] | None = None) -> int:
        """Raise UserError if training would refuse the run's settings, however many processes train it. Return the
        number of global steps with one process.

        - `train_tokens` has the number of tokens in each train split. If it is None, the splits count as long enough.
        - The result is 0 if `train_tokens` is None and the length of the run depends on the data.
        - Validation splits, `initial_weights`, `benchmark_tasks`, and scaled learning rates and weight decays are not
          checked.
        """
        experiment = self.experiment(self.directory.path)  # any folder will do, because no data is read
        with explained(f"{self.name}: "):
            experiment.check_together()
            layout = experiment.layout(1)  # a run that can start with several processes can also start with one
            if train_tokens is not None or self.train_config.min_train_tokens != -1:
                enough = [COUNTABLE] * len(self.train_config.dataset_weights)
                return experiment.position(layout, train_tokens or enough, None).total_steps
        return 0


def _settings(model: ModelConfig, train: TrainConfig) -> dict[str, Any]:
    return {**model.model_dump(mode="json"), **train.model_dump(mode="json")}


def unknown_key(keys: Iterable[str]) -> str | None:
    """Return a message about the first of `keys` that is no key of model.json or train.json, or None if all are."""
    key = next((key for key in keys if key not in MODEL_KEYS and key not in TRAIN_KEYS), None)
    if key is None:
        return None
    if ours := next((ours for theirs, ours, _ in SPELLINGS if theirs == key), None):
        said = f'is the lab notebook\'s name for "{ours}"; set that key instead'
    elif known := advice(key, "train.json"):
        said = known
    elif near := nearest(key, [*MODEL_KEYS, *TRAIN_KEYS]):
        said = f'unknown; did you mean "{near}"?'
    else:
        said = "unknown; docs/configuration.md lists the keys"
    return f"key {quoted(key)}: {said}"


def load_base(runs_dir: Path, name: str) -> DerivedRun:
    """Load a run from which other runs can be derived. Keys of the lab notebook's program (see runs/upstream.py) are
    replaced by this program's keys. Raises UserError if the run does not exist or one of its files is wrong."""
    run = RunDirectory.find(runs_dir, name)
    model_config = load_model_config(run.model_json)
    has_experts = model_config.moe is not None
    train_config = load_train_config(run.train_json, has_experts=has_experts)
    train = translate_upstream(read_json_object(run.train_json), has_experts=has_experts)
    return DerivedRun(run, read_json_object(run.model_json), train, model_config, train_config)


def derive(base: DerivedRun, name: str, changes: Changes, sweep: str | None = None) -> DerivedRun:
    """Return a run called `name` with the settings of `base`, updated by `changes`. Nothing is written.

    - A change to None removes a key: its default applies.
    - A value for a key of ALTERNATIVES removes its alternatives. A value for `depth` removes the keys set by `depth`.
    - `on_end` is not inherited.
    - An inherited relative path of `initial_weights` still leads to the same place.

    Raises UserError if `name`, a key or a value is invalid.
    """
    if wrong := unknown_key(changes):
        raise UserError(wrong)
    run = RunDirectory(base.directory.path.parent / check_name(name, "run"))
    given = {key: value for key, value in changes.items() if value is not None}
    excluded = [keys for keys in ALTERNATIVES if not given.keys().isdisjoint(keys)]
    excluded += [("n_layers", "n_heads", "emb_dim")] if "depth" in given else []
    # A base's `on_end` may end the rental of the machine, although another run is to follow there.
    dropped = {*changes, "on_end"}.union(*excluded).difference(given)
    model, train = (
        {key: value for key, value in file.items() if key not in dropped}
        | {key: value for key, value in given.items() if key in keys}
        for file, keys in ((base.model, MODEL_KEYS), (base.train, TRAIN_KEYS))
    )
    weights = base.train.get("initial_weights")
    if weights is not None and "initial_weights" not in changes and not os.path.isabs(weights):
        train["initial_weights"] = os.path.normpath(os.path.join("..", base.directory.path.name, weights))
    configs = (parse_config(ModelConfig, model, run.model_json), parse_config(TrainConfig, train, run.train_json))
    for dataset in configs[1].dataset_weights:
        check_dataset_name(dataset)
    if configs[1].mirror not in (None, "none"):
        check_url(configs[1].mirror)  # a secret in it must not be written into the new run's files
    before = base.settings
    differs = {
        key: {"base": before[key], "here": value}
        for key, value in _settings(*configs).items()
        if before[key] != value and (key != "initial_weights" or key in changes)
    }
    return DerivedRun(run, model, train, *configs, base.name, sweep, differs)


def derive_for_dataset(base: DerivedRun, name: str, changes: Changes, datasets_dir: Path) -> DerivedRun:
    """Return the run that `derive` returns, fitted to the datasets that `changes` name.

    - The vocabulary, validation, length and warm-up are fitted, as the help of derive_run.py describes.
    - Keys in `changes` are never fitted.
    - Nothing is fitted if `changes` name no dataset, or if a train split is missing in `datasets_dir`.

    Raises UserError if `name`, a key, a value or a dataset is invalid, or if `check_startable` or
    `check_validation_slice` refuses the fitted run.
    """
    run = derive(base, name, changes)
    weights = run.train_config.dataset_weights
    if "dataset" not in changes or not all(is_present(datasets_dir, each, ["train"]) for each in weights):
        return run
    data = TrainingData.open(datasets_dir, weights)
    tokens, fitting = data.lengths("train"), _fitting(run, data, changes)
    run = derive(base, name, {**fitting, **changes})
    try:
        run.check_startable(tokens)
    except UserError:
        if any(key in changes for key in BUDGETS) or run.train_config.epochs == "repeat":
            raise
        run.check_startable()  # raises errors that more tokens would not prevent, such as that of a long warm-up
        fitting["min_train_tokens"] = -1
        warmup = base.train_config.warmup_steps
        if warmup and not {"warmup_steps", "warmup_period_percent"} & changes.keys():
            run = derive(base, name, {**fitting, **changes, "warmup_steps": None})
            fitting["warmup_steps"] = min(warmup, max(1, run.check_startable(tokens) // 10))
        run = derive(base, name, {**fitting, **changes})
        run.check_startable(tokens)
    run.experiment(datasets_dir).check_validation_slice(data)
    return run


def _fitting(run: DerivedRun, data: TrainingData, given: Changes) -> dict[str, JsonValue]:
    """Return the changes that fit a run to its data's vocabulary and validation splits. The caller must override
    them with the changes in `given`."""
    config, context, vocabulary = run.train_config, run.model_config.context_length, data.vocab_size
    changes: dict[str, JsonValue] = {}
    if vocabulary is not None and not vocabulary <= run.model_config.vocab_size < vocabulary + PADDING:
        changes["vocab_size"] = vocabulary
    if config.validates and not all(part.has_split("validation") for part in data.parts):
        changes |= NO_VALIDATION
        changes["checkpoint_interval"] = config.checkpoint_interval or config.validation_interval
    elif config.validates:
        lengths, start = data.lengths("validation"), config.start_val_token or 0
        order = WindowOrder(lengths, context, first_token=start, weights=data.weights)
        if min(order.windows) < 1:
            return changes  # `check_validation_slice` refuses what does not fit
        there = order.available(1.0)  # sequences, read once at most
        if config.validation_sequences is not None:
            changes["validation_sequences"] = min(config.validation_sequences, there)
            return changes
        rows = config.microbatch_size
        while rows > there and "microbatch_size" not in given:
            rows //= 2
        # It must divide the global batches, too.
        rows = next(size for size in range(rows, 0, -1) if all(each % size == 0 for each in config.global_batches))
        changes["microbatch_size"] = rows
        changes["validation_batches"] = min(config.validation_batches or 1, max(1, there // rows))
    return changes


def write_runs(runs: Sequence[DerivedRun]) -> None:
    """Write the folders of all runs, which must not exist yet. If a folder cannot be written, none is left, and
    RunError is raised. If the process is killed, folders may be missing, but none is incomplete."""
    made: list[Path] = []
    try:
        for run in runs:
            derived = {"parent": run.parent, "sweep": run.sweep, "differs": run.differs}
            with atomic_folder(run.directory.path) as draft:
                for name, values in (("model.json", run.model), ("train.json", run.train), ("derived.json", derived)):
                    text = json.dumps(values, indent=4, allow_nan=False)
                    (draft / name).write_text(f"{text}\n", encoding="utf-8")
            made.append(run.directory.path)
    except BaseException as error:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        place = error.filename or run.directory.path.parent
        raise RunError(f"{place}: the runs cannot be written: {error.strerror}") from None
