"""The time and cost of a run on the machines of a price list: its tokens over a speed, times the price of an hour.

A speed is one that was measured on such a machine with the run's model and kernels, else one reported of the model
there, else an estimate. Tokens and global batch are the run's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.common.errors import UserError
from harness.common.json_files import parse_config
from harness.common.units import amount_text
from harness.comparison.inconclusive import Inconclusive
from harness.comparison.table import aligned, cut_names, number_text, paragraph
from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig, load_model_config
from harness.planning.estimated_speed import UNCERTAINTY, estimated_speed, find_device, too_small, why_not
from harness.planning.machines import PRICES, Machine, read_machines
from harness.runs.budget import batch_schedule, tokens_of_budget
from harness.runs.directory import RunDirectory
from harness.runs.reported import read_reported
from harness.runs.summary import read_summary
from harness.runs.throughput import cost, same_kernels
from harness.runs.train_config import load_train_config

BASES = ("measured", "reported", "estimated")
LONGEST_NAME = 24
HEADINGS = ("machine", "$/h", "tokens/s", "hours", "dollars", "basis")


@dataclass(frozen=True)
class KnownSpeed:
    """Tokens per second of training alone, at which a run was trained on a machine."""

    run: str
    basis: str  # "measured" by this program, or "reported" by somebody
    device: str
    layout: BatchLayout
    model: ModelConfig
    train: Mapping[str, Any]
    tokens_per_second: float


@dataclass(frozen=True)
class Projection:
    """The speed of a run's training on a machine, its basis, and how far the true one may be off, as a fraction."""

    machine: Machine
    tokens: int
    tokens_per_second: float
    basis: str
    uncertainty: float = 0.0
    note: str = ""

    @property
    def hours(self) -> float:
        return self.tokens / self.tokens_per_second / 3600

    @property
    def dollars(self) -> float:
        return cost(3600 * self.hours, self.machine.price_per_hour)


def machine_lines(run: RunDirectory, others: Sequence[RunDirectory], prices: Path = PRICES) -> Iterator[str]:
    """The table of one run in lines of 80 columns, by the speeds in its folder and in those of `others`; within a
    basis the cheapest machine comes first.

    Raises UserError for wrong files of the run or a wrong price list; unreadable files of others are passed over.
    """
    machines = read_machines(prices)
    known = known_speeds(run)
    for other in others:
        if other.path.name != run.path.name:
            with suppress(UserError):
                known += known_speeds(other)
    name = run.path.name
    work = read_work(run)
    if isinstance(work, Inconclusive):
        yield from paragraph(f"{name} on other machines: {work}")
        return
    model, train, layout, tokens = work
    sequences = layout.global_tokens // layout.context_length
    yield from paragraph(
        f"{name} on other machines: {tokens:,} tokens in global batches of {sequences:,} sequences. Training alone: "
        "validation, checkpoints and set-up come on top, and whether a microbatch fits is for -f to find."
    )
    found = {each.machine: project(name, model, train, layout, tokens, each, known) for each in machines}
    projections = [each for each in found.values() if isinstance(each, Projection)]
    projections.sort(key=lambda each: (BASES.index(each.basis), each.dollars))
    if projections:
        yield ""
        names = cut_names([each.machine.machine for each in projections], LONGEST_NAME)
        rows = [(shown, *_row(each)) for shown, each in zip(names, projections, strict=True)]
        yield from aligned(HEADINGS, rows, left=("machine", "basis"))
        yield ""
    reasons: dict[str, list[str]] = {}
    for each in machines:
        result = found[each.machine]
        if isinstance(result, Inconclusive):
            reasons.setdefault(str(result), []).append(each.machine)
    for reason, names in reasons.items():
        yield from paragraph(f"{', '.join(names)}: {reason}")
    for projection in projections:
        if projection.note:
            yield from paragraph(f"{projection.machine.machine}: {projection.note}")
    if len({each.basis for each in projections}) > 1:
        yield from paragraph(
            "Compare machines of one basis: a reported speed is another program's, an estimate nobody's."
        )
    for source in dict.fromkeys(f"{each.machine.date}: {each.machine.source}" for each in projections):
        yield from paragraph(f"Prices of {source}; prices change: --prices FILE takes others.")


def project(
    run: str,
    model: ModelConfig,
    train: Mapping[str, Any],
    layout: BatchLayout,
    tokens: int,
    machine: Machine,
    known: Sequence[KnownSpeed],
) -> Projection | Inconclusive:
    """Project a training of `tokens` tokens onto a machine; `known` are speeds of any models and machines."""
    sequences = layout.global_tokens // layout.context_length
    each, rest = divmod(sequences, machine.gpus)
    if rest or not each:
        return Inconclusive(f"its global batch of {sequences:,} sequences cannot be divided by {machine.gpus} GPUs")
    here = [speed for speed in known if speed.model == model and _is_of(speed, machine)]
    measured = [speed for speed in here if speed.basis == "measured" and same_kernels(speed.train, train)]
    usable = measured or [speed for speed in here if speed.basis == "reported"]
    if usable:
        best = max(usable, key=lambda speed: (speed.run == run, speed.tokens_per_second))
        note = "" if best.run == run else f"{best.basis} of {best.run}, microbatch {best.layout.microbatch_size}"
        return Projection(machine, tokens, best.tokens_per_second, best.basis, note=note)
    size = next(n for n in range(min(layout.microbatch_size, each), 0, -1) if each % n == 0)
    return _estimate(
        model, train, machine, BatchLayout(machine.gpus, each // size, size, layout.context_length), tokens
    )


def _estimate(
    model: ModelConfig, train: Mapping[str, Any], machine: Machine, layout: BatchLayout, tokens: int
) -> Projection | Inconclusive:
    device = find_device(machine.device)
    reason = f"nothing is known of {machine.device}"
    if device is not None:
        reason = why_not(train, machine.gpus, model) or too_small(model, device, layout, train) or ""
    if device is None or reason:
        return Inconclusive(f"no speed on such a machine is known, and none is estimated: {reason}")
    return Projection(machine, tokens, estimated_speed(model, device, layout, train), "estimated", UNCERTAINTY)


def _is_of(speed: KnownSpeed, machine: Machine) -> bool:
    device = find_device(machine.device)
    same = speed.device == machine.device if device is None else find_device(speed.device) == device
    return same and speed.layout.world_size == machine.gpus


def _row(each: Projection) -> tuple[str, ...]:
    """Cells behind the machine's name; of an estimate the ends of its range."""
    factors = (1 / (1 + each.uncertainty), 1 / (1 - each.uncertainty)) if each.uncertainty else (1.0,)
    speed = float(f"{each.tokens_per_second:.3g}") if each.uncertainty else each.tokens_per_second
    return (
        number_text(each.machine.price_per_hour, ",.2f"),
        number_text(speed, ",.0f"),
        *(" to ".join(amount_text(value * factor) for factor in factors) for value in (each.hours, each.dollars)),
        each.basis,
    )


def read_work(run: RunDirectory) -> tuple[ModelConfig, Mapping[str, Any], BatchLayout, int] | Inconclusive:
    """The model, train.json with its defaults, batch layout and tokens of a run, trained or not. Raises UserError for
    files of the run that are wrong."""
    config, model = load_train_config(run.train_json), load_model_config(run.model_json)
    summary = read_summary(run.summary) if run.summary.exists() else None
    reported = read_reported(run)
    try:
        layout = BatchLayout(1, config.accumulation_steps(1), config.microbatch_size, model.context_length)
        if summary is not None and summary.microbatch_size and summary.accumulation_steps:
            ranks, steps, size = summary.world_size, summary.accumulation_steps, summary.microbatch_size
            layout = BatchLayout(ranks, steps, size, model.context_length)
        elif reported is not None and reported.layout is not None:
            there = reported.layout
            if (there.microbatch_size, there.context_length) == (config.microbatch_size, model.context_length):
                layout = there
        tokens = tokens_of_budget(config, model, batch_schedule(config, layout))
    except UserError as error:  # a batch of more tokens than there can be
        return Inconclusive(f"its numbers are too large: {error}")
    tokens = tokens or (summary.tokens_seen if summary else None)
    if not tokens:
        return Inconclusive(f"its {config.budget} is -1, all there is, and it has not trained yet")
    return model, config.model_dump(mode="json"), layout, tokens


def known_speeds(run: RunDirectory) -> list[KnownSpeed]:
    """The speeds in a run's folder: measured long enough to be believed, and reported. Raises UserError for files of
    the run that are wrong."""
    name, found = run.path.name, []
    summary = read_summary(run.summary) if run.summary.exists() else None
    speed = summary.tokens_per_second if summary else None
    if summary and speed and summary.measured and summary.measured.is_believable and summary.model:
        with suppress(UserError):  # a later version's model, with keys that this one does not know
            model = parse_config(ModelConfig, summary.model, run.summary)
            size, steps = summary.microbatch_size or 0, summary.accumulation_steps or 0
            layout = BatchLayout(summary.world_size, steps, size, model.context_length)
            if size and steps:
                found.append(KnownSpeed(name, "measured", summary.device, layout, model, summary.train, speed))
    reported = read_reported(run)
    if reported is not None and reported.model is not None and reported.layout and reported.training_speed:
        model = parse_config(ModelConfig, reported.model, run.reported)
        speed = reported.training_speed
        found.append(KnownSpeed(name, "reported", reported.device, reported.layout, model, reported.train, speed))
    return found
