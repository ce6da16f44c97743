"""Data points for fitting a scaling law: size, tokens, FLOPs and final loss of trained models, read from the folders of
finished runs or from a CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.common.errors import UserError, explained
from harness.common.files import read_text
from harness.common.messages import abbreviated, nearest
from harness.runs.checkpoint_meta import tokens_by_source, validation_text
from harness.runs.directory import RunDirectory
from harness.runs.summary import RunSummary, read_summary

FLOPS_PER_PARAMETER = 6  # and per token: C = 6ND for N parameters, D tokens (Kaplan et al., arXiv:2001.08361, 2.1)
COLUMNS = ("parameters", "flops", "loss")
OPTIONAL_COLUMNS = ("tokens", "name")
SAME_SIZE = 0.01  # sizes, or token counts, at most 1 % apart count as one


@dataclass(frozen=True)
class Point:
    """A data point: one trained model, with its size, tokens, FLOPs and final loss."""

    name: str
    parameters: float
    tokens: float
    flops: float  # of the whole training
    loss: float  # nats per token
    unique_tokens: float | None = None  # those of `tokens` that were not repetitions; None if not known
    is_by_rule: bool = False  # `tokens` was not given, and is flops / 6 / parameters


class Points:
    """Data points of n trained models. `parameters`, `tokens`, `flops`, `loss` and `epochs` are arrays [n].

    `left_out` has lines about omitted models. `trained_on` has the dataset and the context length of the first run, or
    is None for points from a file.
    """

    def __init__(
        self, points: Sequence[Point], left_out: Sequence[str] = (), trained_on: tuple[object, object] | None = None
    ) -> None:
        self.points, self.left_out, self.trained_on = [*points], [*left_out], trained_on
        self.names = [point.name for point in points]
        quantities = [(point.parameters, point.tokens, point.flops, point.loss) for point in points]
        self.parameters, self.tokens, self.flops, self.loss = np.array(quantities, float).reshape(-1, 4).T
        unique = np.array([point.unique_tokens or point.tokens for point in points], float)
        self.epochs = self.tokens / unique  # [n] passes over the unique tokens; 1 where these are not known
        # Points whose tokens are computed by the rule C = 6ND cannot show whether the rule holds.
        self.tokens_by_rule = sum(point.is_by_rule for point in points)

    def __len__(self) -> int:
        return len(self.points)

    def without_highest(self, count: int) -> Points:
        """Return the points without the `count` highest losses. Raises UserError if no points would be left."""
        if not count:
            return self
        if count >= len(self):
            raise UserError(f"--drop-highest {count:,}: there are {len(self):,} points; give a smaller number")
        # These losses often belong to models whose size is far from the best. Besiroglu et al. (arXiv:2404.10102) leave
        # out five.
        order = np.argsort(self.loss, kind="stable")
        dropped = abbreviated([f"{self.loss[index]:.3f}" for index in order[-count:]])
        remark = f"the {count:,} highest losses (--drop-highest): {dropped}"
        return Points(
            [self.points[index] for index in sorted(order[:-count])], [*self.left_out, remark], self.trained_on
        )


def different(values: np.ndarray) -> int:
    """Return the number of different sizes or token counts in `values`. After sorting, a value at most 1 % above the
    one before it counts as the same."""
    gaps = np.diff(np.sort(np.log(values)))
    return int(np.count_nonzero(gaps > SAME_SIZE)) + 1 if len(values) else 0


@dataclass(frozen=True)
class CostLaw:
    """Cost of training: FLOPs = coefficient x parameters^exponent x tokens. The rule of thumb C = 6ND has coefficient 6
    and exponent 1."""

    coefficient: float = FLOPS_PER_PARAMETER
    exponent: float = 1.0
    largest_error: float = 0.0  # relative, over the points that it was fitted to

    @classmethod
    def of(cls, points: Points) -> CostLaw:
        """Return the rule of thumb C = 6ND if it is exact for all points, otherwise a fit to the points."""
        ratio = points.flops / points.tokens / points.parameters
        if np.allclose(ratio, FLOPS_PER_PARAMETER, rtol=1e-6):
            return cls()
        # In small models the rule is not exact. The shares of embeddings (which are looked up) and of attention (which
        # grows with the context) change with the size.
        x, y = np.log(points.parameters), np.log(ratio)
        slope, intercept = np.polyfit(x, y, 1) if different(points.parameters) > 1 else (0.0, y.mean())
        error = np.abs(np.expm1(y - intercept - slope * x)).max()
        return cls(math.exp(intercept), 1 + float(slope), float(error))

    @property
    def is_rule_of_thumb(self) -> bool:
        return (self.coefficient, self.exponent) == (FLOPS_PER_PARAMETER, 1.0)

    def tokens(self, flops: np.ndarray | float, parameters: np.ndarray | float) -> np.ndarray:
        """Return the number of tokens on which a model of this size can be trained with these FLOPs; infinite for a
        size of 0."""
        with np.errstate(divide="ignore", over="ignore"):
            return np.asarray(flops / (self.coefficient * np.asarray(parameters) ** self.exponent))

    def flops(self, parameters: float, tokens: float) -> float:
        return float(self.coefficient * parameters**self.exponent * tokens)


# From a CSV file


def read_points(path: Path) -> Points:
    """Read points from a CSV file with the columns COLUMNS and perhaps OPTIONAL_COLUMNS. Missing tokens are computed as
    flops / 6 / parameters. Points whose loss is not finite are left out. Raises UserError if the file is wrong, or if
    no point is left."""
    with explained(after="; give a CSV file of points"):
        lines = ["" if line.startswith("#") else line.strip() for line in read_text(path).splitlines()]
    reader = csv.reader(lines, skipinitialspace=True, strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: not CSV: {error}; check the quotes") from None
    columns = [name.strip().lower() for name in rows[0][1]] if rows else []
    _check_columns(path, columns)
    points = []
    for line, row in rows[1:]:
        if len(row) != len(columns):
            raise UserError(f"{path}:{line}: {len(row)} values for {len(columns)} columns; give one for each")
        points.append(_point(f"{path}:{line}", line, dict(zip(columns, row, strict=True))))
    finite = [point for point in points if math.isfinite(point.loss)]
    if not finite:
        raise UserError(f"{path}: no line has a finite loss; below the column names, give a line for each run")
    lost = [f"{point.name}: its loss is not finite" for point in points if not math.isfinite(point.loss)]
    return Points(finite, lost)


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    if not columns:
        raise UserError(f"{path}: has no data; its first line must name the columns {', '.join(COLUMNS)}")
    for name in COLUMNS:
        if name not in columns:
            raise UserError(f"{path}: column {name}: missing; there are: {abbreviated(columns)}")
    if twice := next((name for name in columns if columns.count(name) > 1), None):
        raise UserError(f"{path}: column {twice}: named twice; rename or remove one of the two")
    for name in {*columns}.difference(COLUMNS, OPTIONAL_COLUMNS):
        # A misspelled `tokens` column would otherwise be ignored, and the tokens computed by the rule C = 6ND.
        if meant := nearest(name, OPTIONAL_COLUMNS):
            raise UserError(f"{path}: column {name}: unknown; did you mean {meant}? Rename it, or leave it out")


def _point(where: str, line: int, row: dict[str, str]) -> Point:
    values = {}
    for key in (*COLUMNS, "tokens"):
        text = row.get(key, "").strip()
        if not text and key == "tokens":
            continue
        try:
            values[key] = float(text)
        except ValueError:
            said = f"{text!r} is not a number" if text else "empty; give a number"
            raise UserError(f"{where}: column {key}: {said}") from None
        is_diverged = key == "loss" and not math.isfinite(values[key])  # `read_points` leaves it out
        if not is_diverged and not 0 < values[key] < 1e40:
            raise UserError(f"{where}: column {key}: {text} must be greater than 0 and less than 1e40")
    is_by_rule = "tokens" not in values
    values.setdefault("tokens", values["flops"] / FLOPS_PER_PARAMETER / values["parameters"])
    return Point(row.get("name", "").strip() or f"line {line}", **values, is_by_rule=is_by_rule)


# From run folders


def points_of_runs(runs: Sequence[RunDirectory]) -> Points:
    """Return the points of finished runs, with their final validation losses. `Points.left_out` names each run that
    gives no point, with the reason. Raises UserError if no run gives a point, or if points differ in validation or
    training text."""
    points: list[Point] = []
    left_out: list[str] = []
    first_texts: dict[str, object] = {}
    trained_on = None
    for run in runs:
        name = run.path.name
        try:
            if not run.summary.is_file():
                raise UserError(f"has not finished (no {run.summary.name})")
            summary = read_summary(run.summary)
            point, texts = _point_of_run(name, summary)
        except UserError as error:
            left_out.append(f"{name}: {error}")
            continue
        first_texts = first_texts or texts
        trained_on = trained_on or (summary.train.get("dataset"), (summary.model or {}).get("context_length"))
        for key, first in first_texts.items():
            if texts[key] != first:
                raise UserError(
                    f"{name}: its {key} is {texts[key]}, and that of {points[0].name} is {first}: one law cannot hold "
                    "for both; give runs with the same training text and the same validation text"
                )
        if twin := next((each for each in points if replace(each, name=name) == point), None):
            left_out.append(f"{name}: has exactly the size, tokens and loss of {twin.name}: a copy, not counted again")
        else:
            points.append(point)
    if not points:
        raise UserError(f"none of the runs gives a point: {abbreviated(left_out, separator='; ')}")
    return Points(points, left_out, trained_on)


def _point_of_run(name: str, summary: RunSummary) -> tuple[Point, dict[str, object]]:
    """Return the point of a finished run, and facts about its training and validation text. All runs of a law must have
    equal facts. Raises UserError with the reason if the run gives no point."""
    dataset = summary.dataset or {}
    text = validation_text(summary.model or {}, summary.train, dataset)
    if summary.train.get("initial_weights") is not None:
        raise UserError("begins with weights that were trained before (initial_weights), on tokens not counted here")
    if summary.changes:
        raise UserError(f"was changed during training: {abbreviated(summary.changes, separator='; ')}")
    if summary.active_parameters is not None:
        raise UserError("has a mixture of experts, for which these laws do not hold")
    if summary.parameters is None or summary.flops_per_token is None or not summary.tokens_seen:
        raise UserError("its summary.json, of an earlier version, lacks parameters, FLOPs or tokens")
    if summary.final_validation_loss is None:
        raise UserError("has no finite validation loss at its end")
    if summary.has_diverged:
        raise UserError("has diverged: its loss stayed far above its lowest, or its last gradients were not finite")
    if text is None:
        raise UserError("does not record which text its validation losses were measured on")
    flops = float(summary.flops_per_token) * summary.tokens_seen
    facts = {f"validation {key}": value for key, value in text._asdict().items()}
    facts["training text (SHA-256)"] = (dataset.get("train") or {}).get("sha256")
    seen = summary.tokens_seen
    parts = tokens_by_source(summary.model or {}, summary.train, dataset, seen).values()
    unique = sum(map(min, parts)) or None
    return Point(name, summary.parameters, seen, flops, summary.final_validation_loss, unique), facts
