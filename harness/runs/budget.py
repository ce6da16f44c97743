"""The training budget of train.json, as a number of tokens and of global steps.

A budget resolved at the start of a run is recorded in every checkpoint, and holds until train.json asks for another
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from harness.common.errors import UserError
from harness.data.loader import BatchLayout, BatchSchedule
from harness.model.config import ModelConfig
from harness.runs.train_config import TrainConfig

COUNTABLE = 2**62  # tokens of a run are below it


class Budget(BaseModel):
    """A budget as resolved when the run began, recorded in checkpoints and summaries."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    key: str
    value: float | int
    tokens: Annotated[int, Field(ge=1, lt=COUNTABLE)]  # of the whole run: a whole number of that time's global batches

    @classmethod
    def of(cls, config: TrainConfig, tokens: int) -> Budget:
        """Return train.json's budget, resolved to `tokens`. Raises UserError if those are more than can be counted."""
        key, value = config.budget, getattr(config, config.budget)
        if tokens >= COUNTABLE:
            raise UserError(
                f'train.json: key "{key}": {value:g} comes to {tokens:.2g} tokens, more than can be counted '
                f"({COUNTABLE:.2g}); lower it"
            )
        return cls(key=key, value=value, tokens=tokens)

    def describe(self) -> str:
        value = f"{self.value:,}" if isinstance(self.value, int) else f"{self.value:,g}"
        return f"{self.key} {value}: {self.tokens:,} tokens"


def batch_schedule(config: TrainConfig, layout: BatchLayout, tokens_seen: int = 0) -> BatchSchedule:
    """The global batches from where `tokens_seen` tokens have been seen; `layout` is the largest of them.

    Raises UserError where one of a ramp is not a whole number of microbatches on every rank.
    """
    if config.batch_ramp is None:
        return BatchSchedule.constant(layout)
    accumulated = [(tokens, config.accumulation_steps(layout.world_size, size)) for tokens, size in config.batch_ramp]
    layouts = [(tokens, replace(layout, accumulation_steps=steps)) for tokens, steps in accumulated]
    return BatchSchedule.ramp(layouts, tokens_seen)


def tokens_of_budget(config: TrainConfig, model: ModelConfig, batches: BatchSchedule) -> int | None:
    """The tokens of a run by what its files say: whole global batches of `batches`, which begin with the run. None for
    all there is.

    As many as `tokens_per_parameter` wants, or more (20: Hoffmann et al., arXiv:2203.15556, which is about where their
    three fits agree; all parameters count, of experts the active ones, which are those that a token's operations are
    for: 6ND holds with them). At most what `target_flops` pays for, with `flops_per_token` for each.
    Raises UserError for a budget below one global batch.
    """
    if config.train_steps is not None:
        return batches.tokens_before(config.train_steps)
    if config.tokens_per_parameter is not None:
        wanted = config.tokens_per_parameter * model.active_parameters
        check_one_batch(config, wanted / batches.tokens_before(1))
        return batches.tokens_before(batches.steps_for(math.ceil(wanted)))
    if config.target_flops is not None:
        check_one_batch(config, config.target_flops / model.flops_per_token / batches.tokens_before(1))
        paid = int(config.target_flops) // model.flops_per_token  # exact, as a quotient of floats is not
        return batches.tokens_before(max(1, batches.steps_within(paid)))
    tokens = config.min_train_tokens
    return None if tokens is None or tokens == -1 else batches.tokens_before(batches.steps_for(tokens))


def stated_tokens(config: TrainConfig, model: ModelConfig) -> float | None:
    """Tokens that a budget names, not rounded to global batches; None for all there is, and for steps without a
    `global_batch_size`."""
    if config.train_steps is not None and config.global_batch_size is not None:
        return config.train_steps * config.global_batch_size * model.context_length
    if config.tokens_per_parameter is not None:
        return config.tokens_per_parameter * model.active_parameters
    if config.target_flops is not None:
        return config.target_flops / model.flops_per_token
    return None if config.min_train_tokens in (None, -1) else config.min_train_tokens


def check_one_batch(config: TrainConfig, batches: float) -> None:
    """Raises UserError for a budget that pays for less than one global batch; `batches` is how many it pays for."""
    if batches >= 1:
        return
    key, value = config.budget, getattr(config, config.budget)
    needed = "raise it"
    if batches:  # of the smallest numbers, their part of a batch is no number any more
        enough = value / batches
        digits = 10.0 ** (math.floor(math.log10(enough)) - 2)  # three of them, rounded up
        needed += f" to at least {math.ceil(enough / digits) * digits:g}"
    raise UserError(
        f'train.json: key "{key}": {value:g} is below one global batch ({batches:.2g} of it); {needed}, or make the '
        "global batch smaller"
    )


def as_tokens(train: Mapping[str, Any], recorded: Budget | None) -> Mapping[str, Any]:
    """A recorded train.json as if its budget had been given in tokens: two budgets may come to the same
    run."""
    if recorded is None:
        return train
    return {**train, recorded.key: None, "min_train_tokens": recorded.tokens}


def wanted_tokens(train: Mapping[str, Any], recorded: Budget | None) -> int | None:
    """The tokens that a run is to see, by its recorded train.json and budget; None where that names no number."""
    if recorded is not None:
        return recorded.tokens
    tokens = train.get("min_train_tokens")
    return tokens if isinstance(tokens, int) and tokens > 0 else None
