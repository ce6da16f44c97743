"""An experiment as the command line names it: a run directory and where its dataset is, loaded and checked; where its
training starts or goes on, and whether it may.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.common.errors import UserError
from harness.data.dataset import Dataset, dataset_folder
from harness.data.fetch import check_obtainable
from harness.data.loader import BatchLayout, BatchSchedule
from harness.model.config import ModelConfig, load_model_config
from harness.planning.rates import ScaledSettings, build_schedule, scale_settings
from harness.runs.budget import Budget, batch_schedule, tokens_of_budget
from harness.runs.checkpoint_meta import CheckpointMeta, Provenance, validation_text
from harness.runs.directory import RunDirectory
from harness.runs.train_config import TrainConfig, load_train_config

# train.json's keys that decide which tokens a step sees; the others may change between stop and continue.
POSITION_KEYS = ("dataset", "start_train_token")


@dataclass(frozen=True)
class Position:
    """The steps still to do and the token they start at."""

    first_step: int
    total_steps: int
    start_token: int  # of the step `first_step`
    tokens_seen: int  # before it

    @property
    def last_step(self) -> int:
        return self.total_steps - 1

    def is_due(self, step: int, interval: int | None) -> bool:
        """True if work that is done every `interval` steps, and after the last one, is due after this one: decided from
        the global step alone, so that every rank decides alike."""
        return interval is not None and (step % interval == 0 or step == self.last_step)

    @property
    def is_finished(self) -> bool:
        return self.first_step >= self.total_steps


def find_position(
    config: TrainConfig,
    layout: BatchLayout,
    split_tokens: int,
    *,
    done_steps: int = 0,
    done_tokens: int = 0,
    wanted: int | None = None,
) -> Position:
    """The position after the steps and tokens that are done, for the batch of today; `wanted`: tokens of the whole
    run, if train.json's budget is not `min_train_tokens`.

    It continues at the token it stopped at, so that a change of world size, microbatch or accumulation neither repeats
    nor skips one. Raises UserError if the split is too short.
    """
    start, batches = config.start_train_token + done_tokens, batch_schedule(config, layout, done_tokens)
    available = split_tokens - start
    wanted = config.min_train_tokens if wanted is None else wanted
    assert wanted is not None, "a budget that is not in tokens was made tokens of before"
    if wanted == -1:
        exhausted = done_tokens > 0 and available - 1 < batches.tokens_before(1)
    else:
        exhausted = done_tokens >= wanted
        wanted = max(1, wanted - done_tokens)
    try:
        steps = 0 if exhausted else batches.num_steps(wanted, available)
    except UserError as error:
        raise UserError(
            f'the train split of {config.dataset} is too short: from token {start:,} (train.json: "start_train_token") '
            f"{error}; lower {config.budget} or the batch"
        ) from None
    return Position(done_steps, done_steps + steps, start, done_tokens)


def check_continuable(meta: CheckpointMeta, path: Path, now: Provenance) -> None:
    """Raises UserError, showing the difference, if the checkpoint at `path` belongs to another model or dataset, its
    tokens were counted from another place, or its optimizer's state is another one's, than `now`'s."""
    for part in ("model", "dataset"):
        then, today = getattr(meta, part), getattr(now, part)
        if part == "model" and isinstance(then, dict):  # an earlier version knew of fewer keys
            then = {**ModelConfig.defaults(), **then}
        if part == "dataset" and isinstance(then, dict):  # a run may have gone without the validation split
            both = then.keys() & today.keys()
            then, today = ({key: side[key] for key in sorted(both)} for side in (then, today))
        difference = first_difference(then, today)
        if difference:
            raise UserError(f"{path}: made with another {part}: {difference}; put it back, or use --restart")
    for key in POSITION_KEYS:
        then, today = meta.train.get(key), now.train.get(key)
        if then != today:
            raise UserError(
                f'{path}: made with "{key}": {json.dumps(then)}, but train.json has {json.dumps(today)}; put it back, '
                "or use --restart"
            )
    then, today = meta.train.get("optimizer", "adamw"), now.train["optimizer"]
    if then != today:
        raise UserError(
            f'{path}: made with "optimizer": "{then}", but train.json has "{today}"; put it back, use --restart, or '
            'let another run start from its weights ("initial_weights")'
        )


def comparable_losses(meta: CheckpointMeta, provenance: Provenance) -> bool:
    """Return whether validation measures its losses on the same text today as in the run up to a checkpoint, of whose
    model and data set `check_continuable` knows that they are today's."""
    then, now = (
        validation_text(provenance.model, settings, provenance.dataset) for settings in (meta.train, provenance.train)
    )
    return then == now


def changed_settings(meta: CheckpointMeta, provenance: Provenance) -> list[str]:
    """The keys of train.json that changed since a checkpoint, as "key: old -> new" in JSON's spelling."""
    then, now = meta.train, provenance.train
    return [f"{key}: {_change(then[key], now[key])}" for key in now if key in then and then[key] != now[key]]


def first_difference(then: Any, now: Any, prefix: str = "") -> str | None:
    """The first difference between two JSON values as "key: old -> new" in JSON's spelling."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in then if key not in now)]:
            found = first_difference(then.get(key), now.get(key), f"{prefix}{key}: ")
            if found:
                return found
        return None
    return None if then == now else f"{prefix}{_change(then, now)}"


def _change(then: Any, now: Any) -> str:
    return f"{json.dumps(then)} -> {json.dumps(now)}"


# That of Switch Transformers (Fedus et al., arXiv:2101.03961, section 2.2), whose tokens go through one expert: the
# loss grows with their number.
SWITCH_LOSS_SCALE = 0.01


@dataclass(frozen=True)
class Experiment:
    """`config` is what train.json says, `model` what model.json says."""

    run: RunDirectory
    config: TrainConfig
    model: ModelConfig
    datasets_dir: Path

    @classmethod
    def load(cls, run: RunDirectory, datasets_dir: Path) -> Experiment:
        """Read both files of the run. Raises UserError for anything wrong in them."""
        model = load_model_config(run.model_json)
        config = load_train_config(run.train_json, has_experts=model.moe is not None)
        dataset_folder(datasets_dir, config.dataset)  # a name that cannot be one is noticed here
        experiment = cls(run, config, model, datasets_dir)
        experiment.check_together()
        return experiment

    def check_together(self) -> None:
        """Raises UserError for what each of the two files may say, but not both."""
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

    @property
    def moe_router_loss_scale(self) -> float:
        """The coefficient of the loss that balances experts; 0 without any."""
        if self.model.moe is None:
            return 0.0
        own = self.config.moe_router_loss_scale
        return SWITCH_LOSS_SCALE / self.model.moe.num_active_experts if own is None else own

    @property
    def splits(self) -> list[str]:
        """The splits that training reads."""
        return ["train", "validation"] if self.config.validates else ["train"]

    def check_dataset(self, *, ask_hub: bool) -> None:
        """Raises UserError for a dataset that is not on this machine and cannot be had; check_obtainable says more."""
        check_obtainable(self.datasets_dir, self.config.dataset, self.splits, ask_hub=ask_hub)

    @property
    def initial_weights(self) -> Path | None:
        """The file that train.json says to start from."""
        named = self.config.initial_weights
        return None if named is None else self.run.path / named

    def layout(self, world_size: int) -> BatchLayout:
        steps = self.config.accumulation_steps(world_size)
        return BatchLayout(world_size, steps, self.config.microbatch_size, self.model.context_length)

    def batches(self, layout: BatchLayout, tokens_seen: int = 0) -> BatchSchedule:
        """The global batches from where so many tokens have been seen."""
        return batch_schedule(self.config, layout, tokens_seen)

    def budget(self, layout: BatchLayout, meta: CheckpointMeta | None) -> Budget | None:
        """Return the run's resolved budget: as recorded in the checkpoint that `meta` describes, or else from its
        files. None for `min_train_tokens`, which is in tokens already.

        Raises UserError for a budget below one global batch.
        """
        config, recorded = self.config, meta.budget if meta else None
        if recorded is not None and (recorded.key, recorded.value) == (config.budget, getattr(config, config.budget)):
            return recorded
        if config.min_train_tokens is not None:
            return None
        if config.train_steps is not None and meta is not None:  # some of them with another batch, perhaps
            left = max(0, config.train_steps - (meta.global_step + 1))
            tokens: int | None = meta.tokens_seen + self.batches(layout, meta.tokens_seen).tokens_before(left)
        else:
            tokens = tokens_of_budget(config, self.model, self.batches(layout))
        return None if tokens is None else Budget.of(config, tokens)

    def position(
        self, layout: BatchLayout, split_tokens: int, meta: CheckpointMeta | None, budget: Budget | None = None
    ) -> Position:
        """Position where training resumes after the checkpoint that `meta` describes, or starts without one; `budget`:
        as returned by `budget`.

        Raises UserError if the split is too short, or the warm-up longer than the run.
        """
        done = {"done_steps": meta.global_step + 1, "done_tokens": meta.tokens_seen} if meta else {}
        budget = budget or self.budget(layout, meta)
        wanted = None if budget is None else budget.tokens
        position = find_position(self.config, layout, split_tokens, **done, wanted=wanted)
        build_schedule(self.config, position.total_steps)
        return position

    def scaled_settings(self, layout: BatchLayout, position: Position) -> ScaledSettings:
        """Apply train.json's scaling rules to its learning rates and weight decay."""
        left = self.batches(layout, position.tokens_seen).tokens_before(position.total_steps - position.first_step)
        tokens, layers = position.tokens_seen + left, self.model.n_layers
        return scale_settings(self.config, batch_tokens=layout.global_tokens, train_tokens=tokens, layers=layers)

    def provenance(self, dataset: Dataset) -> Provenance:
        """Return the provenance of this experiment's checkpoints."""
        return Provenance(
            model=self.model.model_dump(mode="json"),
            parameters=self.model.parameters,
            train=self.config.model_dump(mode="json"),
            dataset={"name": self.config.dataset, **dataset.fingerprint()},
        )

    def check_validation_slice(self, layout: BatchLayout, dataset: Dataset) -> None:
        """Raises UserError if the validation split is too short for train.json's slice of it."""
        config = self.config
        if config.validation_batches is None or config.start_val_token is None:
            return
        wanted = config.start_val_token + config.validation_batches * layout.microbatch_tokens + 1
        there = len(dataset.split("validation"))
        if there < wanted:
            raise UserError(
                f"the validation split of {config.dataset} is too short: wanted {wanted:,} tokens (train.json: "
                f"start_val_token + validation_batches x microbatch), but there are {there:,}; lower one of them"
            )

    def check_checkpoint(self, meta: CheckpointMeta, dataset: Dataset) -> None:
        """Raises UserError if the checkpoint that `meta` describes is another experiment's."""
        check_continuable(meta, self.run.checkpoints, self.provenance(dataset))
