"""The training budget of train.json, resolved to a number of tokens.

A budget in another unit than tokens is resolved when a run starts. Checkpoints record the result, which is used until
train.json gives another budget.
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

COUNTABLE = 2**62  # a run has fewer tokens than this


class Budget(BaseModel):
    """The budget of train.json, resolved to tokens, as summaries and checkpoints record it."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    key: str  # the key of train.json that gives the budget
    value: float | int  # that key's value
    # Tokens of the whole run, in whole global batches as they were when the budget was resolved
    tokens: Annotated[int, Field(ge=1, lt=COUNTABLE)]

    def describe(self) -> str:
        """Return the budget as text: "train_steps 100: 3,276,800 tokens"."""
        value = f"{self.value:,}" if isinstance(self.value, int) else f"{self.value:,g}"
        return f"{self.key} {value}: {self.tokens:,} tokens"


def batch_schedule(config: TrainConfig, layout: BatchLayout, tokens_seen: int = 0) -> BatchSchedule:
    """Return the schedule of global batches after the first `tokens_seen` tokens of a run. `layout` has the largest
    global batch. Raises UserError if a batch of a ramp is not a whole number of microbatches on every rank."""
    if config.batch_ramp is None:
        return BatchSchedule.constant(layout)
    accumulated = [(tokens, config.accumulation_steps(layout.world_size, size)) for tokens, size in config.batch_ramp]
    layouts = [(tokens, replace(layout, accumulation_steps=steps)) for tokens, steps in accumulated]
    return BatchSchedule.ramp(layouts, tokens_seen)


def tokens_of_budget(config: TrainConfig, model: ModelConfig, batches: BatchSchedule) -> int | None:
    """Return the number of tokens of the whole run, or None if the budget is all tokens of the split. `batches` must be
    the schedule from the start of the run.

    The number is rounded up to whole global batches; for `target_flops`, down. Raises UserError if
    `tokens_per_parameter` or `target_flops` gives less than one global batch.
    """
    if config.train_steps is not None:
        return batches.tokens_before(config.train_steps)
    wanted = stated_tokens(config, model)
    if wanted is None:
        return None
    paid_batches, key = wanted / batches.tokens_before(1), config.budget_key
    if paid_batches < 1 and key != "min_train_tokens":
        raise UserError(
            f'train.json: key "{key}": {getattr(config, key):g} gives less than one global batch '
            f"({paid_batches:.2g} of one); raise it, or make the global batch smaller"
        )
    if config.target_flops is not None:
        return batches.tokens_before(max(1, batches.steps_within(paid_tokens(config, model))))
    return batches.tokens_before(batches.steps_for(math.ceil(wanted)))


def paid_tokens(config: TrainConfig, model: ModelConfig) -> int:
    """Return the largest number of tokens whose training takes at most `target_flops`, which must be set."""
    return int(config.target_flops or 0) // model.flops_per_token  # the quotient of floats would not be exact


def stated_tokens(config: TrainConfig, model: ModelConfig) -> float | None:
    """Return the number of tokens that train.json's budget names, not rounded to global batches. Returns None if the
    budget is all tokens of the split, or `train_steps` without `global_batch_size`."""
    if config.train_steps is not None and config.global_batch_size is not None:
        return config.train_steps * config.global_batch_size * model.context_length
    if config.tokens_per_parameter is not None:
        # Only active parameters, because N of them and D tokens take about 6ND FLOPs of training.
        return config.tokens_per_parameter * model.active_parameters
    if config.target_flops is not None:
        return config.target_flops / model.flops_per_token
    return None if config.min_train_tokens in (None, -1) else config.min_train_tokens


def as_tokens(train: Mapping[str, Any], recorded: Budget | None) -> Mapping[str, Any]:
    """Return the recorded train.json `train` with its budget given as `min_train_tokens`. `recorded` is that budget
    resolved to tokens; None: `train` is returned unchanged."""
    if recorded is None:
        return train
    return {**train, recorded.key: None, "min_train_tokens": recorded.tokens}


def wanted_tokens(train: Mapping[str, Any], recorded: Budget | None) -> int | None:
    """Return the number of tokens of a whole run: that of the `recorded` budget if `train` still has this budget, else
    `min_train_tokens` of `train`. Return None if it is not known."""
    if recorded is not None and train.get(recorded.key) == recorded.value:
        return recorded.tokens
    tokens = train.get("min_train_tokens")
    return tokens if isinstance(tokens, int) and tokens > 0 else None
