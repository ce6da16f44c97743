"""The test losses of several models as tables of 80 columns, one for each text that they were measured on."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import UserError, printable
from harness.evaluation.held_out import TestLoss
from harness.model.tensor_names import META
from harness.runs.checkpoint_meta import read_meta

COLUMNS = 80
NAME_WIDTH = 32
UNKNOWN = "-"


@dataclass(frozen=True)
class ModelLoss:
    """A model, by what the table calls it, and its test loss."""

    label: str
    parameters: int
    global_batch: int | None  # sequences per optimizer step; None where nothing beside the weights tells
    test: TestLoss


def recorded_global_batch(weights: Path) -> int | None:
    """Sequences per optimizer step of the training that ended with these weights, if their meta.json has it."""
    with suppress(UserError):
        if (weights.parent / META).is_file():
            meta = read_meta(weights.parent)
            if meta.world_size and meta.microbatch_size and meta.accumulation_steps:
                return meta.world_size * meta.microbatch_size * meta.accumulation_steps
    return None


def loss_tables(models: Sequence[ModelLoss]) -> Iterator[str]:
    """Lines: for each text a table by loss, lowest first, and the text below it."""
    groups: dict[object, list[ModelLoss]] = {}
    for model in models:
        groups.setdefault((model.test.text.content, model.test.precision), []).append(model)
    for number, group in enumerate(groups.values()):
        if number:
            yield ""
        yield from _table(group)
    if len(groups) > 1:
        yield ""
        yield from textwrap.wrap(_across(models), COLUMNS)


def _table(group: Sequence[ModelLoss]) -> Iterator[str]:
    yield _line("model", "loss", "bits/byte", "global batch", "parameters")
    for model in sorted(group, key=lambda model: _by_loss(model.test.loss)):
        label, bits = printable(model.label), model.test.bits_per_byte
        if len(label) > NAME_WIDTH:  # above its numbers, in one piece where that is possible
            yield from textwrap.wrap(label, COLUMNS, break_on_hyphens=False)
        yield _line(
            label if len(label) <= NAME_WIDTH else "",
            f"{model.test.loss:.3f}",
            UNKNOWN if bits is None else f"{'' if model.test.is_exact else '~'}{bits:.3f}",
            UNKNOWN if model.global_batch is None else f"{model.global_batch:,}",
            f"{model.parameters:,}",
        )
    test = group[0].test
    yield from textwrap.wrap(f"Measured on {test.place}, in {test.precision}", COLUMNS, subsequent_indent="  ")
    if any(model.test.bits_per_byte is not None and not model.test.is_exact for model in group):
        about = "~ by the whole split's mean, since the tokenizer's vocabulary is not on this machine"
        yield from textwrap.wrap(about, COLUMNS, subsequent_indent="  ")


def _by_loss(loss: float) -> tuple[bool, float]:
    """Sort key by loss; NaN comes last."""
    return math.isnan(loss), loss


def _line(name: str, loss: str, bits: str, batch: str, parameters: str) -> str:
    return f"{name:<{NAME_WIDTH}} {loss:>7} {bits:>10} {batch:>13} {parameters:>14}"


def _across(models: Sequence[ModelLoss]) -> str:
    """The note that says what may be compared between tables."""
    texts = [model.test.text for model in models]
    if len({(text.sha256, text.tokenizer) for text in texts}) == 1:
        reason = "they are of other parts of the text, read in other lengths, or in another precision"
        return f"Losses compare within a table: {reason}."
    return (
        "Losses compare within a table: between tables the text differs, or how it was made into tokens. Of one text "
        "in two tokenizations the bits per byte compare. --dataset measures all models on one data set."
    )
