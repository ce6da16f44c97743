"""Points of a known scaling law, and finished runs, shared by the tests of scaling laws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from harness.runs.directory import RunDirectory
from harness.scaling.data import Point, Points
from harness.scaling.laws import Law

FIXTURES = Path(__file__).parents[1] / "runs" / "fixtures"
SUMMARY: dict[str, Any] = json.loads((FIXTURES / "one_rank" / "summary.json").read_text())
A, B = 450.0, 2100.0
LAW = Law(*np.array([1.8, np.log(A), np.log(B), 0.35, 0.37]))
BUDGETS = (1e18, 4e18, 1.6e19, 6.4e19)
SPREAD = (0.25, 0.5, 1.0, 2.0, 4.0)  # sizes, as multiples of the best one


def best_size(flops: float) -> float:
    """Return the best number of parameters for `flops`, by equation 4 of Hoffmann et al. (arXiv:2203.15556)."""
    ratio = float(LAW.alpha * A / (LAW.beta * B))
    return float(ratio ** (1 / (LAW.alpha + LAW.beta)) * (flops / 6) ** (LAW.beta / (LAW.alpha + LAW.beta)))


def ladder(noise: float = 0.0, *, seed: int = 0, budgets: tuple[float, ...] = BUDGETS) -> Points:
    """Return points of five sizes at each budget, with the law's losses times exp(normal noise)."""
    random = np.random.default_rng(seed)
    points = []
    for flops in budgets:
        for part in SPREAD:
            size = best_size(flops) * part
            tokens = flops / 6 / size
            loss = float(LAW.loss(size, tokens) * np.exp(random.normal(0, noise)))
            points.append(Point(f"{flops:g} {part}", size, tokens, flops, loss))
    return Points(points)


def points_of(parameters: np.ndarray, tokens: np.ndarray, loss: np.ndarray) -> Points:
    """Return points whose FLOPs follow the rule C = 6ND."""
    return points_with_flops(parameters, tokens, 6 * parameters * tokens, loss)


def points_with_flops(parameters: np.ndarray, tokens: np.ndarray, flops: np.ndarray, loss: np.ndarray) -> Points:
    rows = zip(parameters, tokens, flops, loss, strict=True)
    return Points([Point(str(number), n, d, c, loss) for number, (n, d, c, loss) in enumerate(rows)])


def run_in(folder: Path, name: str, **changed: Any) -> RunDirectory:
    """Write a finished run with some values of its summary.json changed, and return it."""
    run = RunDirectory(folder / name)
    run.path.mkdir()
    run.summary.write_text(json.dumps(SUMMARY | changed))
    return run
