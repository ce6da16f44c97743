"""Where training starts or goes on, and whether it may."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config import TrainConfig
from harness.errors import UserError
from harness.tokens import BatchShape, whole_batches

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
    def is_finished(self) -> bool:
        return self.first_step >= self.total_steps


def find_position(
    config: TrainConfig, shape: BatchShape, split_tokens: int, *, steps_done: int = 0, tokens_seen: int = 0
) -> Position:
    """The position after `steps_done` global steps that saw `tokens_seen` tokens, for the batch shape of today.

    It continues at the token it stopped at, so that a change of world size, microbatch or accumulation neither repeats
    nor skips one. Raises UserError if the split is too short.
    """
    start = config.start_train_token + tokens_seen
    available = split_tokens - start
    wanted = config.min_train_tokens
    if wanted == -1:
        exhausted = tokens_seen > 0 and available - 1 < shape.global_tokens
    else:
        exhausted = tokens_seen >= wanted
        wanted = max(1, wanted - tokens_seen)
    try:
        steps = 0 if exhausted else whole_batches(wanted, available, shape.global_tokens)
    except UserError as error:
        raise UserError(
            f'the train split of {config.dataset} is too short: from token {start:,} (train.json: "start_train_token") '
            f"{error}; lower min_train_tokens or the batch"
        ) from None
    return Position(steps_done, steps_done + steps, start, tokens_seen)


def check_continuable(meta: dict[str, Any], path: Path, now: dict[str, Any]) -> None:
    """Raises UserError, showing the difference, if the checkpoint at `path` belongs to another model or dataset, or
    its tokens were counted from another place, than `now`'s."""
    for part in ("model", "dataset"):
        then, today = meta.get(part), now[part]
        if part == "dataset" and isinstance(then, dict):  # a run may have gone without the validation split
            both = then.keys() & today.keys()
            then, today = ({key: side[key] for key in sorted(both)} for side in (then, today))
        difference = first_difference(then, today)
        if difference:
            raise UserError(f"{path}: made with another {part}: {difference}; put it back, or use --restart")
    then = meta.get("train") or {}
    for key in POSITION_KEYS:
        if then.get(key) != now["train"].get(key):
            raise UserError(
                f'{path}: made with "{key}": {then.get(key)}, but train.json has {now["train"].get(key)}; '
                "put it back, or use --restart"
            )


def same_yardstick(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether losses that decide which checkpoint is best are measured on the same text under both settings."""
    validates = [settings.get("validation_interval") is not None for settings in (then, now)]
    keys = ("validation_batches", "start_val_token", "microbatch_size")
    return validates[0] == validates[1] and (not validates[0] or all(then.get(key) == now.get(key) for key in keys))


def changed_settings(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The keys of train.json that changed since a checkpoint, as "key: old -> new"."""
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
