"""An experiment (a run directory and its datasets), the position at which its training starts or resumes, and checks
before a resumption."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.common.errors import UserError, explained
from harness.data.dataset import dataset_folder, is_present
from harness.data.fetch import check_obtainable
from harness.data.loader import BatchLayout, BatchSchedule
from harness.data.order import WindowOrder
from harness.data.training_data import TrainingData
from harness.model.config import ModelConfig, load_model_config
from harness.planning.rates import build_schedule
from harness.runs.budget import COUNTABLE, Budget, batch_schedule, paid_tokens, tokens_of_budget
from harness.runs.checkpoint_meta import CheckpointMeta, Provenance, validation_text
from harness.runs.directory import RunDirectory
from harness.runs.train_config import BUDGETS, Affects, TrainConfig, keys_affecting, load_train_config


@dataclass(frozen=True)
class Position:
    """The global steps that a run still has to do. Steps are numbered from 0."""

    first_step: int
    total_steps: int  # of the whole run
    tokens_seen: int  # number of tokens of the steps before `first_step`

    @property
    def last_step(self) -> int:
        return self.total_steps - 1

    def is_due(self, step: int, interval: int | None) -> bool:
        """Return True if work is due after the global step `step`: after the last step and after every multiple of
        `interval`, 0 included. If `interval` is None, work is never due."""
        return interval is not None and (step % interval == 0 or step == self.last_step)

    def due_after(self, step: int, config: TrainConfig, interrupted_evaluation: str | None = None) -> set[str]:
        """Return the names of the work that is due after a global step.

        Work is done in the order "report", "validation", "benchmarks", "sample", "checkpoint", "weights_check". If
        `interrupted_evaluation` is given, the names before it in this order are left out.
        """
        intervals = {  # in the order in which it is done
            "report": config.report_interval,
            "validation": config.validation_interval,
            "benchmarks": config.benchmark_interval,
            "sample": config.sample_interval,
            "checkpoint": config.checkpoint_every,
            "weights_check": config.weights_check_interval,
        }
        due = {name for name, interval in intervals.items() if self.is_due(step, interval)}
        # A validation or a checkpoint waits for the device anyway, and records the loss up to this step. So the step is
        # reported, too.
        if due & {"validation", "checkpoint"}:
            due.add("report")
        names = list(intervals)
        return due & set(names[names.index(interrupted_evaluation or "report") :])

    @property
    def is_finished(self) -> bool:
        return self.first_step >= self.total_steps


def find_unfinished_work(config: TrainConfig, position: Position, meta: CheckpointMeta | None) -> set[str]:
    """Return the names, as in `Position.due_after`, of the work that is due after the checkpoint's global step but not
    done.

    An interrupted evaluation leaves such work, and so does a change of settings that makes this step the last one.
    If such a change leaves any work, the names include "checkpoint", although the step already has a checkpoint.
    """
    if meta is None:
        return set()
    step = meta.global_step
    if meta.interrupted_evaluation:
        return position.due_after(step, config, meta.interrupted_evaluation)
    if not position.is_finished or meta.last_step in (None, step):
        return set()
    was_due = replace(position, total_steps=position.total_steps + 1).due_after(step, config)
    missing = position.due_after(step, config) - was_due
    return missing | {"checkpoint"} if missing else missing


# Keys of train.json that must not change when a run resumes, and their values in files that lack them.
FIXED_KEYS = {
    key: None if field.is_required() else field.default
    for key, field in TrainConfig.model_fields.items()
    if key in ("dataset", "start_train_token", "optimizer", "shuffle", "initial_weights") or key.endswith("_seed")
}


def check_continuable(meta: CheckpointMeta, path: Path, now: Provenance) -> None:
    """Raise UserError if `now`, the run's provenance, differs from that of the checkpoint that `meta` describes in the
    model, in the dataset or in one of FIXED_KEYS. The message begins with `path`."""
    for part in ("model", "dataset"):
        then, today = getattr(meta, part), getattr(now, part)
        if part == "model" and isinstance(then, dict):  # earlier versions recorded fewer keys
            then = {**ModelConfig.defaults(), **then}
        # a run without validation does not record the validation split
        if part == "dataset" and isinstance(then, dict):
            both = then.keys() & today.keys()
            then, today = ({key: side[key] for key in sorted(both)} for side in (then, today))
        difference = first_difference(then, today)
        if difference:
            raise UserError(f"{path}: made with another {part}: {difference}; restore the old {part}, or use --restart")
    check_fixed_keys(meta, path, now.train)


def check_fixed_keys(meta: CheckpointMeta, path: Path, train: Mapping[str, Any]) -> None:
    """Raise UserError if one of FIXED_KEYS in train.json (`train`) is not as in the checkpoint that `meta` describes.
    The message begins with `path`."""
    for key, default in FIXED_KEYS.items():
        then, today = meta.train.get(key, default), train[key]
        if then != today:
            raise UserError(
                f'{path}: made with "{key}": {json.dumps(then)}, but train.json has {json.dumps(today)}; restore the '
                'old value, use --restart, or let another run start from its weights ("initial_weights")'
            )


def comparable_losses(meta: CheckpointMeta, provenance: Provenance) -> bool:
    """Return True if validation losses are measured on the same text now as when the checkpoint was saved. The
    checkpoint must have passed `check_continuable`."""
    then, now = (
        validation_text(provenance.model, settings, provenance.dataset) for settings in (meta.train, provenance.train)
    )
    return then == now


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return, for each key whose values in `then` and `now` differ, the first difference, as "key: old -> new" with
    values in JSON. A key that is missing in `then` or `now` is not compared."""
    changes = [first_difference(then[key], now[key], f"{key}: ") for key in now if key in then]
    return [change for change in changes if change]


# Keys whose change at a resumption has no effect on the training loss. Most of them decide only when a checkpoint is
# saved and which one is the best. In place of the keys of the global batch, the resulting accumulation steps are
# compared.
IRRELEVANT_TO_LOSSES = {
    *("validation_interval", "validation_sequences", "validation_batches", "start_val_token"),
    *("checkpoint_interval", "global_batch_size", "gradient_accumulation_steps"),
}


def changes_of_result(
    meta: CheckpointMeta, train: Mapping[str, Any], here: Mapping[str, Any], last_step: int
) -> list[str]:
    """Return the changes since a checkpoint that can affect the training loss: "key: old -> new after global step N".

    `train` is train.json now. `here` has this process's values for keys of meta.json, such as "device". A value that
    the checkpoint does not record counts as unchanged. `last_step` is the run's last global step by today's budget.
    """
    ignored = {*keys_affecting(Affects.SPEED), *keys_affecting(Affects.NOTHING), *IRRELEVANT_TO_LOSSES}
    ignored -= {"residual_precision"}  # affects the speed, but changes the losses by more than rounding errors
    scale = train["scale_with_batch"] or {}
    depends_on_length = train["lr_schedule"] != "constant" or train["warmup_period_percent"]
    if not depends_on_length and not scale.get("reference_train_tokens"):
        ignored |= {*BUDGETS}  # the first steps of a longer run are those of a shorter one
    elif train["min_train_tokens"] == -1:
        ignored -= {"epochs"}  # they decide the length
    then = {**meta.train, **here, **{key: value for key in here if (value := getattr(meta, key)) is not None}}
    now = {**{key: value for key, value in train.items() if key not in ignored}, **here}
    changes = changed_settings(then, now)
    if last_step == meta.last_step and {change.partition(":")[0] for change in changes} <= {*BUDGETS, "epochs"}:
        return []  # the same steps; with another batch, they would be of another number of tokens
    return [f"{change} after global step {meta.global_step}" for change in changes]


def first_difference(then: Any, now: Any, prefix: str = "") -> str | None:
    """Return the first difference between two JSON values, such as "moe: num_experts: 8 -> null", or None if they are
    equal.

    The text begins with `prefix`. A missing key counts as null.
    """
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in then if key not in now)]:
            found = first_difference(then.get(key), now.get(key), f"{prefix}{key}: ")
            if found:
                return found
        return None
    return None if then == now else f"{prefix}{json.dumps(then)} -> {json.dumps(now)}"


# Coefficient of the balancing loss in Switch Transformers (Fedus et al., arXiv:2101.03961, section 2.2), where each
# token uses one expert. The loss grows with the number of experts per token.
SWITCH_LOSS_SCALE = 0.01


@dataclass(frozen=True)
class Experiment:
    """A run directory, its train.json (`config`) and model.json (`model`), and the folder that holds all datasets."""

    run: RunDirectory
    config: TrainConfig
    model: ModelConfig
    datasets_dir: Path

    @classmethod
    def load(cls, run: RunDirectory, datasets_dir: Path) -> Experiment:
        """Read model.json and train.json of the run. Raises UserError if one of them is missing or wrong, or if they
        contradict each other."""
        model = load_model_config(run.model_json)
        config = load_train_config(run.train_json, has_experts=model.moe is not None)
        for name in config.dataset_weights:
            dataset_folder(datasets_dir, name, f'{run.train_json}: key "dataset":')  # raises UserError if it is invalid
        experiment = cls(run, config, model, datasets_dir)
        experiment.check_together()
        return experiment

    def check_together(self) -> None:
        """Raise UserError if model.json and train.json contradict each other, although each of them is valid."""
        if self.model.tie_weights and self.config.head_learning_rate is not None:
            raise UserError(
                f'{self.run.train_json}: key "head_learning_rate": with "tie_weights" in model.json the head is the '
                'token embedding; use "embedding_learning_rate"'
            )
        if self.model.moe is None and self.config.moe_router_loss_scale is not None:
            raise UserError(
                f'{self.run.train_json}: key "moe_router_loss_scale": belongs with "moe" in model.json; remove it, or '
                'give "moe"'
            )

    def check_restart(self) -> None:
        """Raise UserError if --restart would move the file that `initial_weights` names."""
        weights, own = self.initial_weights, os.path.realpath(self.run.checkpoints)
        if weights is not None and weights.is_file() and weights.resolve().is_relative_to(own):
            raise UserError(
                f'{self.run.train_json}: key "initial_weights": names a file in the run\'s own checkpoints, which '
                "--restart moves away; copy the file elsewhere, and name the copy"
            )

    @property
    def moe_router_loss_scale(self) -> float:
        """The coefficient of the loss that balances experts; 0 for a model without experts."""
        if self.model.moe is None:
            return 0.0
        own = self.config.moe_router_loss_scale
        return SWITCH_LOSS_SCALE / self.model.moe.num_active_experts if own is None else own

    @property
    def splits(self) -> list[str]:
        """Names of the splits that training reads."""
        return ["train", "validation"] if self.config.validates else ["train"]

    def check_dataset(self, *, ask_hub: bool) -> None:
        """Raise UserError if a dataset's folder has files but lacks a split, or if a dataset is not on this machine and
        cannot be downloaded or made. If `ask_hub` is false, the Hub is assumed to have the dataset."""
        for name in self.config.dataset_weights:
            check_obtainable(self.datasets_dir, name, self.splits, ask_hub=ask_hub)

    def has_data(self) -> bool:
        """Return True if all datasets are on this machine. Raises UserError if a dataset's folder has files but lacks a
        split. Datasets after the first missing one are not checked."""
        return all(is_present(self.datasets_dir, name, self.splits) for name in self.config.dataset_weights)

    def open_data(self) -> TrainingData:
        """Open the datasets. Raises UserError if one cannot be opened, or if their tokenizers differ."""
        return TrainingData.open(self.datasets_dir, self.config.dataset_weights)

    @property
    def initial_weights(self) -> Path | None:
        """The file whose weights training starts from, or None if train.json names none."""
        named = self.config.initial_weights
        return None if named is None else self.run.path / named

    def initial_weights_errors(self) -> AbstractContextManager[None]:
        """Context manager for reading `initial_weights`: adds the key of train.json and the remedy to a UserError."""
        return explained(
            f'{self.run.train_json}: key "initial_weights": ',
            "; name the model.safetensors of a model of the same shape, by an absolute path or one relative to the "
            "run's folder",
        )

    def layout(self, world_size: int) -> BatchLayout:
        """Return the layout of the global batch on `world_size` ranks. For a batch ramp, this is the last and largest
        batch.

        Raises UserError if the batch is not a whole number of microbatches on every rank.
        """
        steps = self.config.accumulation_steps(world_size)
        return BatchLayout(world_size, steps, self.config.microbatch_size, self.model.context_length)

    def batches(self, layout: BatchLayout, tokens_seen: int = 0) -> BatchSchedule:
        """Return the schedule of global batches from the point where the run has seen `tokens_seen` tokens. `layout`
        comes from the method `layout`.

        Raises UserError if a batch of a ramp is not a whole number of microbatches on every rank.
        """
        return batch_schedule(self.config, layout, tokens_seen)

    def budget(self, layout: BatchLayout, meta: CheckpointMeta | None) -> Budget | None:
        """Return train.json's budget converted to tokens, or None if it is `min_train_tokens`.

        If `meta` records a budget of the same key and value, that record is returned. Raises UserError if the budget or
        a batch is impossible.
        """
        config, recorded = self.config, meta.budget if meta else None
        key, value = config.budget_key, getattr(config, config.budget_key)
        if recorded is not None and (recorded.key, recorded.value) == (key, value):
            return recorded
        if config.min_train_tokens is not None:
            return None
        if config.train_steps is not None and meta is not None:  # earlier steps may have had another batch size
            left = max(0, config.train_steps - (meta.global_step + 1))
            tokens: int | None = meta.tokens_seen + self.batches(layout, meta.tokens_seen).tokens_before(left)
        elif config.target_flops is not None and meta is not None:
            batches, paid = self.batches(layout, meta.tokens_seen), paid_tokens(config, self.model)
            left = batches.steps_within(paid - meta.tokens_seen) if paid > meta.tokens_seen else 0
            tokens = meta.tokens_seen + batches.tokens_before(left)
        else:
            tokens = tokens_of_budget(config, self.model, self.batches(layout))
        assert tokens is not None, "only the budget min_train_tokens can stand for all tokens of the split"
        if tokens >= COUNTABLE:
            raise UserError(
                f'train.json: key "{key}": {value:g} comes to {tokens:.2g} tokens, more than can be counted '
                f"({COUNTABLE:.2g}); lower it"
            )
        return Budget(key=key, value=value, tokens=tokens)

    def window_order(self, split_tokens: Sequence[int]) -> WindowOrder:
        """Return the order in which training reads the windows of its datasets, whose train splits have `split_tokens`
        tokens."""
        config = self.config
        return WindowOrder(
            split_tokens,
            self.model.context_length,
            first_token=config.start_train_token,
            seed=config.seed_of("data") if config.shuffle else None,
            weights=[*config.dataset_weights.values()],
        )

    def available_tokens(self, split_tokens: Sequence[int]) -> int:
        """Return the number of tokens that training can read from train splits of these lengths, last target included.

        All passes count. Returns sys.maxsize if they have no end, and at most the context length, perhaps a negative
        number, if a split is too short for one sequence.
        """
        order, epochs = self.window_order(split_tokens), self.config.epochs
        if min(order.windows) < 1 or (epochs is None and len(split_tokens) == 1):
            return min(split_tokens) - self.config.start_train_token
        if epochs == "repeat":
            return sys.maxsize
        return order.available(epochs or 1.0) * self.model.context_length + 1

    def position(self, layout: BatchLayout, split_tokens: Sequence[int], meta: CheckpointMeta | None) -> Position:
        """Return the global steps still to do after the checkpoint that `meta` describes (None: from the start of the
        run).

        `split_tokens` are the lengths of the train splits. Raises UserError if a split is too short, or if the budget,
        a batch or the schedule is impossible.
        """
        config = self.config
        # Training resumes at the token where it stopped. A change of world size, microbatch or accumulation therefore
        # neither repeats nor skips a token.
        done_steps, done_tokens = (meta.global_step + 1, meta.tokens_seen) if meta else (0, 0)
        budget = self.budget(layout, meta)
        wanted = config.min_train_tokens if budget is None else budget.tokens
        assert wanted is not None, "every budget except min_train_tokens is converted to tokens"
        windows = self.window_order(split_tokens).windows
        if min(windows) < 1:
            part = [*config.dataset_weights][windows.index(0)]
            keys = "start_train_token or context_length" if config.start_train_token else "context_length"
            raise UserError(
                f"the train split of {part} is too short: from token {config.start_train_token:,} on there is no "
                f"sequence of {self.model.context_length:,} tokens and their targets; lower {keys}, or make the "
                "dataset of more text"
            )
        batches = self.batches(layout, done_tokens)
        available = self.available_tokens(split_tokens) - done_tokens
        if wanted == -1:
            exhausted = done_tokens > 0 and available - 1 < batches.tokens_before(1)
        else:
            exhausted = done_tokens >= wanted
            wanted = max(1, wanted - done_tokens)
        try:
            steps = 0 if exhausted else batches.num_steps(wanted, available)
        except UserError as error:
            keys = "the batch" if wanted == -1 else f"{config.budget_key} or the batch"
            keys = f"start_train_token or {keys}" if config.start_train_token else keys
            passes = config.epochs if isinstance(config.epochs, float) else 1.0
            where = f"in {passes:g} epoch{'' if passes == 1 else 's'}"
            start = config.start_train_token + done_tokens
            where += f" after {start:,} tokens" if start else ""
            raise UserError(
                f"the train split of {config.data_name} is too short: {where}, training {error}; lower {keys}, or "
                'allow more passes over it with "epochs"'
            ) from None
        build_schedule(config, done_steps + steps, layout.global_tokens)
        return Position(done_steps, done_steps + steps, done_tokens)

    def provenance(self, data: TrainingData) -> Provenance:
        """Return the model, its number of parameters, train.json and the data, as this experiment's checkpoints record
        them."""
        return Provenance(
            model=self.model.model_dump(mode="json"),
            parameters=self.model.parameters,
            train=self.config.model_dump(mode="json"),
            dataset=data.record(),
        )

    def check_validation_slice(self, data: TrainingData) -> None:
        """Raise UserError if a validation split is too short for the validation that train.json sets."""
        config = self.config
        if config.sequences_per_validation is None or config.start_val_token is None:
            return
        order = self.validation_order(data)
        asked = min(config.sequences_per_validation, sys.maxsize)  # more do not fit into an array
        for part, sequences in zip(data.parts, order.read(asked), strict=True):
            wanted = config.start_val_token + int(sequences) * self.model.context_length + 1
            there = len(part.split("validation"))
            if there < wanted:
                key = "validation_sequences" if config.validation_sequences else "validation_batches"
                raise UserError(
                    f"the validation split of {part.name} is too short: wanted {wanted:,} tokens (start_val_token + "
                    f"{sequences:,} sequences x context_length + 1), but there are {there:,}; lower start_val_token or "
                    f"{key} in train.json, or prepare the dataset with a larger --validation-fraction"
                )

    def validation_order(self, data: TrainingData) -> WindowOrder:
        """Return the order of the windows of the validation splits; validation uses the first ones. train.json must
        have `start_val_token`."""
        start, weights = self.config.start_val_token, [*self.config.dataset_weights.values()]
        assert start is not None
        return WindowOrder(data.lengths("validation"), self.model.context_length, first_token=start, weights=weights)
