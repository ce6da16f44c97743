"""The end of a run in numbers: what summary.json holds and what is printed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness.common.errors import RunError
from harness.common.files import replace_text
from harness.common.json_files import finite
from harness.data.loader import BatchLayout
from harness.runs.checkpoint_meta import TrainState
from harness.runs.directory import RunDirectory
from harness.runs.throughput import Throughput


@dataclass(frozen=True)
class Machine:
    """Where a run took place."""

    device: str
    world_size: int
    peak_memory_gib: float


def summarise(
    state: TrainState, seconds: dict[str, float], speed: Throughput, machine: Machine, shape: BatchLayout
) -> dict[str, Any]:
    """summary.json without the run's configuration.

    Rates are per second of training, not of validation or saving, over what this program trained with the batch and on
    the machine that the summary names; None if that is nothing.
    """
    # What a run never does has no place in its summary.
    seconds = {phase: spent for phase, spent in seconds.items() if spent or phase != "benchmarks"}
    measured = state.measured(seconds["training"])
    rate = measured.tokens_per_second
    mfu = None if rate is None else speed.mfu(rate / machine.world_size)
    total = sum(seconds.values())
    dollars = {phase: round(speed.dollars(spent) or 0, 4) for phase, spent in {**seconds, "total": total}.items()}
    return {
        "seconds": {**{phase: round(spent, 3) for phase, spent in seconds.items()}, "total": round(total, 3)},
        "tokens_seen": state.tokens_seen,
        "trained_tokens": state.trained_tokens,
        "tokens_per_second": None if rate is None else round(rate, 1),
        "measured": {**asdict(measured), "seconds": round(measured.seconds, 3)},
        "global_steps": state.global_step + 1,
        "final_train_loss": finite(state.train_loss),
        "final_validation_loss": finite(state.val_loss),
        "best_loss": finite(state.best_loss),
        "best_step": state.best_step,
        "skipped_steps": state.skipped_steps,
        "flops_per_token": speed.flops_per_token,
        "mfu": None if mfu is None else round(mfu, 4),
        "peak_memory_gib": round(machine.peak_memory_gib, 3),
        "dollars": None if speed.price_per_hour is None else dollars,
        "device": machine.device,
        "world_size": machine.world_size,
        "microbatch_size": shape.microbatch_size,
        "accumulation_steps": shape.accumulation_steps,
        "torch": torch.__version__,
    }


def write_summary(run: RunDirectory, summary: dict[str, Any]) -> None:
    """Write and print a run's summary. Raises RunError if it cannot be written."""
    text = json.dumps({"run": run.path.name, **summary}, indent=2, allow_nan=False)
    try:
        replace_text(run.summary, text + "\n")
    except OSError as error:
        raise RunError(f"{run.summary}: cannot write the summary: {error.strerror}") from None
    print("\n" + describe_summary(summary), flush=True)


def describe_summary(summary: dict[str, Any]) -> str:
    """The summary for a terminal."""
    seconds, dollars = summary["seconds"], summary["dollars"]
    lines = [
        f"Training complete in {seconds['total']:,.3f} seconds",
        "  " + ", ".join(f"{phase} {seconds[phase]:,.1f} s" for phase in seconds if phase != "total"),
        f"Tokens seen: {summary['tokens_seen']:,}{_foreign(summary)}",
        f"Throughput: {_throughput(summary)}",
    ]
    if summary["mfu"] is not None:
        lines.append(f"MFU: {summary['mfu']:.1%}")
    lines.append(f"Peak memory: {summary['peak_memory_gib']:.2f} GiB per device")
    if summary["skipped_steps"]:
        lines.append(f"Skipped steps (gradients not finite): {summary['skipped_steps']:,}")
    lines.append(f"Final train loss: {_loss(summary['final_train_loss'])}")
    if summary["final_validation_loss"] is not None:
        lines.append(f"Final validation loss: {_loss(summary['final_validation_loss'])}")
    if summary["best_step"] is not None:
        lines.append(f"Best loss: {_loss(summary['best_loss'])} at global step {summary['best_step']}")
    if dollars is not None:
        phases = ", ".join(f"{phase} ${cost:,.2f}" for phase, cost in dollars.items() if phase != "total")
        lines.append(f"Cost: ${dollars['total']:,.2f} ({phases})")
    return "\n".join(lines)


def _foreign(summary: dict[str, Any]) -> str:
    trained = summary["trained_tokens"]
    return "" if trained == summary["tokens_seen"] else f", {trained:,} of them trained by this program"


def _throughput(summary: dict[str, Any]) -> str:
    rate, measured = summary["tokens_per_second"], summary["measured"]
    if rate is None:
        return "not measured: nothing is known to be trained with this batch on this machine"
    over = f" ({measured['tokens']:,} tokens in {measured['seconds']:,.1f} s: with this batch on this machine)"
    return f"{rate:,.0f} tokens/second of training{'' if measured['tokens'] == summary['tokens_seen'] else over}"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"
