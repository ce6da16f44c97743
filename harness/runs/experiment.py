"""An experiment as the command line names it: a run directory and where its dataset is, loaded and checked; where its
training starts or goes on, and whether it may.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.common.errors import UserError
from harness.data.dataset import Dataset, dataset_folder
from harness.data.fetch import check_obtainable
from harness.data.loader import BatchLayout, num_whole_batches
from harness.model.config import ModelConfig, load_model_config
from harness.runs.checkpoint_meta import CheckpointMeta, Provenance
from harness.runs.directory import RunDirectory
from harness.runs.schedule import build_schedule
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
        """Whether what is done every `interval` steps, and after the last one, is done after this one: decided from the
        global step alone, so that every rank decides alike."""
        return interval is not None and (step % interval == 0 or step == self.last_step)

    @property
    def is_finished(self) -> bool:
        return self.first_step >= self.total_steps


def find_position(
    config: TrainConfig, layout: BatchLayout, split_tokens: int, *, steps_done: int = 0, tokens_seen: int = 0
) -> Position:
    """The position after `steps_done` global steps that saw `tokens_seen` tokens, for the batch of today.

    It continues at the token it stopped at, so that a change of world size, microbatch or accumulation neither repeats
    nor skips one. Raises UserError if the split is too short.
    """
    start = config.start_train_token + tokens_seen
    available = split_tokens - start
    wanted = config.min_train_tokens
    if wanted == -1:
        exhausted = tokens_seen > 0 and available - 1 < layout.global_tokens
    else:
        exhausted = tokens_seen >= wanted
        wanted = max(1, wanted - tokens_seen)
    try:
        steps = 0 if exhausted else num_whole_batches(wanted, available, layout.global_tokens)
    except UserError as error:
        raise UserError(
            f'the train split of {config.dataset} is too short: from token {start:,} (train.json: "start_train_token") '
            f"{error}; lower min_train_tokens or the batch"
        ) from None
    return Position(steps_done, steps_done + steps, start, tokens_seen)


def check_continuable(meta: CheckpointMeta, path: Path, now: Provenance) -> None:
    """Raises UserError, showing the difference, if the checkpoint at `path` belongs to another model or dataset, or
    its tokens were counted from another place, than `now`'s."""
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
                f'{path}: made with "{key}": {then}, but train.json has {today}; put it back, or use --restart'
            )


def comparable_losses(meta: CheckpointMeta, provenance: Provenance) -> bool:
    """Whether losses that decide which checkpoint is best are measured on the same text today as in the run up to a
    checkpoint."""
    then, now = meta.train, provenance.train
    validates = [settings.get("validation_interval") is not None for settings in (then, now)]
    keys = ("validation_batches", "start_val_token", "microbatch_size")
    return validates[0] == validates[1] and (not validates[0] or all(then.get(key) == now.get(key) for key in keys))


def changed_settings(meta: CheckpointMeta, provenance: Provenance) -> list[str]:
    """The keys of train.json that changed since a checkpoint, as "key: old -> new"."""
    then, now = meta.train, provenance.train
    return [f"{key}: {then.get(key)} -> {now[key]}" for key in now if key in then and then[key] != now[key]]


def first_difference(then: Any, now: Any, prefix: str = "") -> str | None:
    """The first difference between two JSON values as "key: old -> new"."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in then if key not in now)]:
            found = first_difference(then.get(key), now.get(key), f"{prefix}{key}: ")
            if found:
                return found
        return None
    return None if then == now else f"{prefix}{then} -> {now}"


# Enough for every tokenizer in use, and nothing against what a search's limit is made of.
TINY_VOCABULARY = 2**18


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
        config = load_train_config(run.train_json)
        dataset_folder(datasets_dir, config.dataset)  # a name that cannot be one is noticed here
        return cls(run, config, load_model_config(run.model_json), datasets_dir)

    def tiny(self) -> Experiment:
        """The same with next to no model, to which nothing is compiled: it does all the same things in no time."""
        shape = {
            "vocab_size": min(self.model.vocab_size, TINY_VOCABULARY),
            "context_length": 2,
            "emb_dim": 2,
            "n_heads": 1,
            "n_kv_heads": None,
            "head_dim": None,
            "mlp_dim": None,
            "n_layers": 1,
            "value_embeddings": self.model.value_embeddings and 1,
            "bigram_embedding": self.model.bigram_embedding and 2,
        }
        config = self.config.model_copy(update={"compile": False})
        return replace(self, model=self.model.model_copy(update=shape), config=config)

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

    def position(self, layout: BatchLayout, split_tokens: int, meta: CheckpointMeta | None) -> Position:
        """Where training goes on after the checkpoint that `meta` describes, or starts without one.

        Raises UserError if the split is too short, or the warm-up longer than the run.
        """
        done = {"steps_done": meta.global_step + 1, "tokens_seen": meta.tokens_seen} if meta else {}
        position = find_position(self.config, layout, split_tokens, **done)
        build_schedule(self.config, position.total_steps)
        return position

    def provenance(self, dataset: Dataset) -> Provenance:
        """What a checkpoint of this experiment belongs to."""
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
