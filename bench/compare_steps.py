"""Measure this program against others, in one table.

    uv run bench/compare_steps.py

A whole optimizer step (forward, backward, clipping to norm 1.0, AdamW, giving up the gradients; no dropout) of this
program, as its command runs it, against the notebook's formulation, transformers, litgpt and nanoGPT's formulation,
each in its own default on this machine. They run in processes of their own and take their steps in turns, so that what
else the machine does slows all of them alike. Medians, with the quartiles; what was not run has a line that says why.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

# `python bench/...` puts bench/ on the path, not the repository root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import system
from bench.turns import Player, Shape, race
from harness.common.units import GIB

SHAPES = {
    "cpu": [
        Shape(2, 128, 4, 128, 4096, 8),  # quickstart-gpt2's
        Shape(4, 256, 4, 256, 8192, 8),
        Shape(4, 256, 4, 256, 50257, 8),
        Shape(12, 768, 12, 512, 8192, 1),
        Shape(12, 768, 12, 512, 50257, 1),
    ],
    "cuda": [
        Shape(2, 128, 4, 128, 4096, 64),
        *(Shape(4, 256, 4, 256, vocabulary, 64) for vocabulary in (8192, 50257)),
        *(Shape(12, 768, 12, 1024, vocabulary, 8) for vocabulary in (8192, 50257)),
    ],
}
# Who runs against whom: ours with a head of its own or the token embedding's, as the other has it.
OURS, OURS_TIED = ["ddp-pretrain", "ddp-pretrain fp32"], ["ddp-pretrain tied", "ddp-pretrain tied fp32"]
GROUPS = {
    "notebook": [*OURS, "notebook"],
    "transformers": [*OURS_TIED, "transformers", "transformers bf16"],
    "litgpt": [*OURS, "litgpt"],
    "nanogpt": [*OURS_TIED, "nanogpt", "nanogpt bf16"],
}
MIB = 2**20
# Of a waiting contestant: weights, gradients and the two moments of AdamW, in fp32.
BYTES_PER_PARAMETER = 16
MATRIX = 2048
Row = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How long is measured."""

    seconds: float  # of each group
    steps: int  # at least


def matrix_rates(device_name: str) -> dict[str, float]:
    """FLOP/s of large matrix products on this machine: the fastest of several, by dtype."""
    import torch

    device, rates = torch.device(device_name), {}
    size = MATRIX if device.type == "cpu" else 4 * MATRIX
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        best = float("inf")
        for _ in range(20):
            start = time.perf_counter()
            a @ b
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - start)
        rates[name] = 2 * size**3 / best
    return rates


def compare(shape: Shape, group: str, effort: Effort) -> list[Row]:
    """The rows of one group at one shape, ours first."""
    names = [name for name in GROUPS[group] if shape.device == "cpu" or not name.endswith((" fp32", " bf16"))]
    with ExitStack() as stack:
        players = [stack.enter_context(Player(name, shape)) for name in names]
        absent = {player.name: why for player in players if (why := player.begin())}
        present = [player for player in players if player.name not in absent]
        rows = [{"shape": shape.title, "group": group, "program": name, "not_run": why} for name, why in absent.items()]
        if group in absent:
            return rows
        race(present, seconds=effort.seconds, at_least=effort.steps)
        return [_row(player, present, shape, group) for player in present] + rows


def _row(player: Player, players: list[Player], shape: Shape, group: str) -> Row:
    walls = [turn.wall for turn in player.turns]
    low, median, high = statistics.quantiles(walls, n=4)
    row: Row = {"shape": shape.title, "group": group, "program": player.first["title"], "steps": len(walls)}
    row |= {"ms": 1e3 * median, "ms_quartiles": [1e3 * low, 1e3 * high], "tokens_per_second": shape.tokens / median}
    row["processor_ms"] = 1e3 * statistics.median(turn.processor for turn in player.turns)
    row["gflops"] = flops_per_token(shape) * shape.tokens / median / 1e9
    row["peak_mib"] = player.peak_bytes() / MIB
    ours = players[0]
    row["ours_times"] = median / statistics.median(turn.wall for turn in ours.turns)
    row["ours_times_processor"] = row["processor_ms"] / (1e3 * statistics.median(turn.processor for turn in ours.turns))
    return row


def flops_per_token(shape: Shape) -> int:
    return shape.model_config().flops_per_token


def room_is_missing(shape: Shape, group: str) -> str | None:
    """Why a group cannot run in the memory that is free; None if it can."""
    if shape.device != "cpu":
        return None
    from harness.common.memory import free_memory

    needed = (len(GROUPS[group]) + 1) * shape.model_config().parameters * BYTES_PER_PARAMETER  # one is at it
    free = free_memory()
    return f"needs about {needed / GIB:.0f} GiB, and {free / GIB:.0f} are free" if needed > free else None


HEADER = (
    f"{'program':28}{'ms (quartiles)':>24}{'proc. ms':>10}{'tokens/s':>10}{'GFLOP/s':>9}{'peak MiB':>10}"
    f"{'ours ×':>8}{'(proc.)':>9}"
)


def line_of(row: Row) -> str:
    """A row of the table."""
    if "not_run" in row:
        return f"{row['program']:28} not run: {row['not_run']}"
    low, high = row["ms_quartiles"]
    times = f"{row['ms']:,.1f} ({low:,.1f}–{high:,.1f})"
    return (
        f"{row['program']:28}{times:>24}{row['processor_ms']:>10,.1f}{row['tokens_per_second']:>10,.0f}"
        f"{row['gflops']:>9,.0f}{row['peak_mib']:>10,.0f}{row['ours_times']:>8.2f}{row['ours_times_processor']:>9.2f}"
    )


def compare_all(shapes: Iterable[Shape], groups: list[str], effort: Effort) -> list[Row]:
    """All groups at all shapes, printed as they come."""
    found: list[Row] = []
    for shape in shapes:
        click.echo(f"\n{shape.title}\n{HEADER}")
        for group in groups:
            missing = room_is_missing(shape, group)
            none = {"shape": shape.title, "group": group, "program": group, "not_run": missing}
            for row in [none] if missing else compare(shape, group, effort):
                click.echo(line_of(row))
                found.append(row)
    return found


@click.command(help=__doc__)
@click.option("--only", "only", multiple=True, type=click.Choice([*GROUPS, *system.PARTS]), help="Again for more.")
@click.option("--shape", "wanted", multiple=True, type=click.IntRange(1, 5), help="Number of a shape; all of them.")
@click.option("--seconds", type=click.FloatRange(0), default=20.0, show_default=True, help="Of each comparison.")
@click.option("--steps", type=click.IntRange(3), default=7, show_default=True, help="Of each program, at least.")
@click.option("--quick", is_flag=True, help="The smallest shape, three steps.")
@click.option("--compile", "compiled", is_flag=True, help="torch.compile for all (on a GPU always).")
@click.option("--device", default=None, help="cpu, cuda; default: a GPU where there is one.")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write all rows into FILE.")
def main(only: tuple[str, ...], wanted: tuple[int, ...], file: Path | None, **given: Any) -> None:
    import torch

    device = given["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    effort = Effort(0.0, 3) if given["quick"] else Effort(given["seconds"], given["steps"])
    numbers = wanted or ((1,) if given["quick"] else range(1, 6))
    compiled = given["compiled"] or device != "cpu"
    shapes = [
        Shape(**{**vars(SHAPES[device.split(":")[0]][number - 1]), "device": device, "compile": compiled})
        for number in numbers
    ]
    rates = matrix_rates(device)
    machine = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device != "cpu" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "matrix_gflops": {name: rate / 1e9 for name, rate in rates.items()},
    }
    click.echo(
        f"{machine['device']}, torch {torch.__version__}, {machine['threads']} threads, load {machine['load']:.1f}"
    )
    click.echo(f"matrix products: {', '.join(f'{rate / 1e9:,.0f} GFLOP/s in {name}' for name, rate in rates.items())}")
    groups = [name for name in GROUPS if not only or name in only]
    rows = compare_all(shapes, groups, effort) if groups else []
    parts = [name for name in system.PARTS if name in only or not only]
    further = [row for part in parts for row in system.measure(part, quick=given["quick"])]
    if file:
        file.write_text(json.dumps({"machine": machine, "steps": rows, "further": further}, indent=1) + "\n")


if __name__ == "__main__":
    main()
