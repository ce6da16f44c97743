"""How many times as many tokens one setting needs as another for the same loss, and where that leads.

    uv run sweep_runs.py run sweeps/efficiency.json datasets --groups 2 --processes 1
    uv run bench/token_factor.py 'efficiency-plain.*' 'efficiency-stack.*' --at 3.26e9

Of each run of the second setting, the tokens at which the first one has its loss are read off the first one's losses,
straight between them over the logarithm of tokens; their ratio is k. Its geometric mean comes with the 95 % interval of
Student's t for the mean of ln k. At tokens that no run has seen it is an extrapolation, which supposes that k stays as
it is; the interval knows of no other error than the runs'.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import click
import numpy as np
from scipy.special import stdtrit

# `python bench/...` puts bench/ on the path, not the repository root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.common.errors import UserError, one_line_errors


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


def mean_factor(k: np.ndarray) -> tuple[float, float, float]:
    """Geometric mean, and the ends of its 95 % interval. Raises UserError with fewer than two."""
    if len(k) < 2:
        raise UserError(f"{len(k)} of the second setting's losses lie between the first one's: at least two must")
    logs = np.log(k)
    half = float(stdtrit(len(k) - 1, 0.975)) * float(logs.std(ddof=1)) / math.sqrt(len(k))
    middle = float(logs.mean())
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--at", "places", type=float, multiple=True, help="Tokens of the first setting.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def main(first: str, second: str, places: tuple[float, ...], runs_dir: Path) -> None:
    """Print k at each run's loss, and its mean; and how many of SECOND's tokens --at tokens of FIRST come to."""
    with one_line_errors():
        needed, k = factors(ends(runs_dir, first), ends(runs_dir, second))
        for tokens, factor in zip(needed, k, strict=True):
            print(f"{tokens:14,.0f} tokens of {first} are {tokens / factor:12,.0f} of {second}: k = {factor:.2f}")
        mean, low, high = mean_factor(k)
        print(f"k = {mean:.2f} [{low:.2f}, {high:.2f}]")
        for place in places:
            print(
                f"{place:14,.0f} tokens are {place / mean:,.0f} [{place / high:,.0f}, {place / low:,.0f}]: extrapolated"
            )


if __name__ == "__main__":
    main()
