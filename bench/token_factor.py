"""How many times as many tokens one setting needs as another for the same loss, and where that leads.

    uv run sweep_runs.py run sweeps/efficiency.json datasets --groups 2 --processes 1
    uv run bench/token_factor.py 'efficiency-plain.*' 'efficiency-stack.*' --at 3.26e9

Of each run of the second setting, the tokens at which the first one has its loss are read off the first one's losses,
straight between them over the logarithm of tokens; their ratio is k. A straight line of ln k over ln tokens, by least
squares, gives k at any number of tokens with the 95 % interval of the line there (Draper & Smith, Applied Regression
Analysis, section 1.4). Beyond the runs that is an extrapolation, and the interval knows of no other error than theirs.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import click
import numpy as np

# `python bench/...` puts bench/ on the path, not the repository root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.analysis.distributions import student_quantile


def ends(runs_dir: Path, pattern: str) -> dict[int, float]:
    """Tokens and mean final validation loss of the seeds with as many, of all finished runs of the pattern."""
    losses: dict[int, list[float]] = {}
    for file in sorted(runs_dir.glob(f"{pattern}/summary.json")):
        summary = json.loads(file.read_text())
        losses.setdefault(summary["tokens_seen"], []).append(summary["final_validation_loss"])
    return {tokens: float(np.mean(each)) for tokens, each in sorted(losses.items())}


def factors(first: dict[int, float], second: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the first setting, and k, at each loss of the second that lies between two of the first."""
    losses = np.array(list(first.values()))[::-1]
    logs = np.log(list(first))[::-1]
    inside = {tokens: loss for tokens, loss in second.items() if losses[0] <= loss <= losses[-1]}
    needed = np.exp(np.interp(list(inside.values()), losses, logs))
    return needed, needed / np.array(list(inside))


def line_at(x: np.ndarray, y: np.ndarray, place: float) -> tuple[float, float]:
    """The least-squares line of y over x at a place, and half of its 95 % interval there."""
    slope, intercept = np.polyfit(x, y, 1)
    spread = math.sqrt(float(np.sum((y - intercept - slope * x) ** 2)) / (len(x) - 2))
    width = math.sqrt(1 / len(x) + (place - x.mean()) ** 2 / float(np.sum((x - x.mean()) ** 2)))
    return float(intercept + slope * place), student_quantile(0.975, len(x) - 2) * spread * width


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--at", "places", type=float, multiple=True, help="Tokens of the first setting.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def main(first: str, second: str, places: tuple[float, ...], runs_dir: Path) -> None:
    """Print k at each run's loss, and at --at with its interval."""
    needed, k = factors(ends(runs_dir, first), ends(runs_dir, second))
    for tokens, factor in zip(needed, k, strict=True):
        print(f"{tokens:14,.0f} tokens of {first} are {tokens / factor:12,.0f} of {second}: k = {factor:.2f}")
    for place in places:
        middle, half = line_at(np.log(needed), np.log(k), math.log(place))
        low, high = (math.exp(middle + sign * half) for sign in (-1, 1))
        print(f"{place:14,.0f} tokens: k = {math.exp(middle):.2f} [{low:.2f}, {high:.2f}], extrapolated")
        print(f"  {place / math.exp(middle):,.0f} tokens [{place / high:,.0f}, {place / low:,.0f}]")


if __name__ == "__main__":
    main()
