"""Time and cost of a run's training on each machine of a price list. The training speed was measured by this program,
or reported by others, for the same model on the same kind of machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.common.errors import UserError
from harness.common.json_files import parse_config
from harness.common.messages import aligned, amount_text, paragraph
from harness.common.statistics import Inconclusive
from harness.comparison.table import cut_names, number_text
from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig, load_model_config
from harness.planning.estimated_speed import find_device
from harness.planning.machines import PRICES, Machine, machine_of_run, read_machines
from harness.runs.budget import batch_schedule, tokens_of_budget
from harness.runs.directory import RunDirectory
from harness.runs.reported import read_reported
from harness.runs.summary import read_summary
from harness.runs.throughput import cost, same_kernels
from harness.runs.train_config import load_train_config

LONGEST_NAME = 24
HEADINGS = ("machine", "$/h", "tokens/s", "hours", "dollars", "basis")


@dataclass(frozen=True)
class KnownSpeed:
    """The speed at which a run was trained on a machine, not counting validation."""

    run: str
    basis: str  # "measured" by this program, or "reported" in reported.json
    device: str
    gpus: int
    microbatch_size: int
    tokens_per_second: float


def machine_lines(run: RunDirectory, others: Sequence[RunDirectory], prices: Path = PRICES) -> Iterator[str]:
    """Yield lines for a terminal: the time and cost of `run` on each machine of the price list `prices`. Speeds are
    from the folders of `run` and `others`. Raises UserError if the price list or a file of `run` is wrong."""
    machines, work, name = read_machines(prices), _read_work(run, prices), run.path.name
    if isinstance(work, Inconclusive):
        yield from paragraph(f"{name} on other machines: {work}")
        return
    model, train, sequences, tokens = work
    known = known_speeds(run, model, train)
    for other in others:
        if other.path.name != name:
            with suppress(UserError):
                known += known_speeds(other, model, train)
    batches = f" in global batches of {sequences:,} sequences" if sequences else ""
    yield from paragraph(
        f"{name} on other machines: {tokens:,} tokens{batches}. Hours and dollars are without validation, set-up and, "
        'if the basis is "measured", checkpoints. ddp_train.py -f finds the largest microbatch size that fits.'
    )
    found: list[tuple[str, float, Machine, KnownSpeed]] = []  # basis, dollars, machine, speed
    reasons: dict[str, list[str]] = {}
    for machine in machines:
        device, here = find_device(machine.device), []
        for speed in known:
            same = speed.device == machine.device if device is None else find_device(speed.device) == device
            if same and speed.gpus == machine.gpus:
                here.append(speed)
        usable = [speed for speed in here if speed.basis == "measured"] or here
        if usable and sequences % machine.gpus == 0:
            speed = max(usable, key=lambda speed: (speed.run == name, speed.tokens_per_second))
            dollars = cost(tokens / speed.tokens_per_second, machine.price_per_hour)
            found.append((speed.basis, dollars, machine, speed))
            continue
        reason = (
            "no speed of this run's model and kernels is known there; ddp_train.py --plan --assume-device estimates one"
        )
        if sequences % machine.gpus:
            reason = f"the run's global batch of {sequences:,} sequences cannot be divided among {machine.gpus} GPUs"
        reasons.setdefault(reason, []).append(machine.machine)
    found.sort(key=lambda each: each[:2])
    if found:
        yield ""
        names = cut_names([machine.machine for _, _, machine, _ in found], LONGEST_NAME)
        rows = [
            (
                shown,
                number_text(machine.price_per_hour, ",.2f"),
                number_text(speed.tokens_per_second, ",.0f"),
                amount_text(tokens / speed.tokens_per_second / 3600),
                amount_text(dollars),
                basis,
            )
            for shown, (basis, dollars, machine, speed) in zip(names, found, strict=True)
        ]
        yield from aligned(HEADINGS, rows, left=("machine", "basis"))
        yield ""
    for reason, without in reasons.items():
        yield from paragraph(f"{', '.join(without)}: {Inconclusive(reason)}")
    for basis, _, machine, speed in found:
        if speed.run != name:
            said = f"speed {basis} for {speed.run}, microbatch {speed.microbatch_size}"
            yield from paragraph(f"{machine.machine}: {said}")
    if len({basis for basis, *_ in found}) > 1:
        yield from paragraph("Compare only machines with the same basis: a reported speed is that of another program.")
    for source in dict.fromkeys(f"{machine.date}: {machine.source}" for _, _, machine, _ in found):
        yield from paragraph(f"Prices of {source}. Prices change; --prices FILE reads a list of your own.")


def _read_work(run: RunDirectory, prices: Path) -> tuple[ModelConfig, Mapping[str, Any], int, int] | Inconclusive:
    """Return the run's model, train.json with defaults, sequences per global batch (0: not fixed yet), and tokens of
    the whole training. Returns Inconclusive if the number of tokens cannot be known."""
    if not run.train_json.exists():
        return Inconclusive("it has no train.json, which would say how much it trains on")
    config, model = load_train_config(run.train_json), load_model_config(run.model_json)
    summary = read_summary(run.summary) if run.summary.exists() else None
    reported = read_reported(run)
    try:
        name, price = run.path.name, config.price_per_hour
        meant = machine_of_run(name, price, prices) or machine_of_run(name, price)
        # Steps without a global batch, on a machine that is not known, are counted as on one GPU.
        ranks, is_fixed = meant[0].gpus if meant else 1, bool(meant or config.global_batches or config.train_steps)
        layout = BatchLayout(ranks, config.accumulation_steps(ranks), config.microbatch_size, model.context_length)
        if summary is not None and summary.microbatch_size and summary.accumulation_steps:
            ranks, steps, size = summary.world_size, summary.accumulation_steps, summary.microbatch_size
            layout, is_fixed = BatchLayout(ranks, steps, size, model.context_length), True
        elif reported is not None and reported.layout is not None:
            there = reported.layout
            if (there.microbatch_size, there.context_length) == (config.microbatch_size, model.context_length):
                layout, is_fixed = there, True
        recorded = summary.budget if summary else None
        if recorded and getattr(config, recorded.key, None) == recorded.value:  # None: a key of an earlier version
            tokens: int | None = recorded.tokens
        else:
            tokens = tokens_of_budget(config, model, batch_schedule(config, layout))
    except UserError as error:
        return Inconclusive(str(error))
    tokens = tokens or (summary.tokens_seen if summary else None)
    if not tokens:
        return Inconclusive(
            f"its number of tokens is not known: {config.budget_key} is -1 (the whole split), and the run has not been "
            "trained to its end yet"
        )
    sequences = layout.global_tokens // layout.context_length if is_fixed else 0
    return model, config.model_dump(mode="json"), sequences, tokens


def known_speeds(run: RunDirectory, model: ModelConfig, train: Mapping[str, Any]) -> list[KnownSpeed]:
    """Return the training speeds of `model` found in a run's folder: the measured one, if the settings `train` lead to
    the same kernels, and the reported one. Raises UserError if summary.json or reported.json is wrong."""
    name, found = run.path.name, []
    summary = read_summary(run.summary) if run.summary.exists() else None
    if summary and summary.has_shape(model) and same_kernels(summary.train, train):
        speed, size, measured = summary.tokens_per_second, summary.microbatch_size, summary.measured
        if speed and size and summary.accumulation_steps and measured and not measured.shortfall:
            found.append(KnownSpeed(name, "measured", summary.device, summary.world_size, size, speed))
    reported = read_reported(run)
    if reported is not None and reported.layout and reported.training_speed:  # a layout needs reported.model
        size, theirs = reported.layout.microbatch_size, parse_config(ModelConfig, reported.model or {}, run.reported)
        if theirs == model:
            found.append(KnownSpeed(name, "reported", reported.device, reported.gpus, size, reported.training_speed))
    return found
