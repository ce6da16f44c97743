"""The points that a scaling law is fitted to: size, tokens, FLOPs and final loss of finished runs, or of a CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.common.errors import UserError
from harness.common.messages import abbreviated, nearest
from harness.runs.checkpoint_meta import validation_text
from harness.runs.directory import RunDirectory
from harness.runs.summary import RunSummary, read_summary

FLOPS_PER_PARAMETER = 6  # and token: the rule C = 6 N D (Kaplan et al., arXiv:2001.08361, section 2.1)
QUANTITIES = ("parameters", "tokens", "flops", "loss")
COLUMNS = ("parameters", "flops", "loss")
OTHER_COLUMNS = ("tokens", "name")  # that there may be
SAME_SIZE = 0.01  # sizes, or token counts, less than 1 % apart count as one
LARGEST_FILE_BYTES = 2**26


@dataclass(frozen=True)
class Point:
    """One trained model."""

    name: str
    parameters: float
    tokens: float
    flops: float  # of all its training
    loss: float  # nats per token
    is_by_rule: bool = False  # whether its tokens were not given, and are flops / 6 / parameters


@dataclass(frozen=True)
class Points:
    """Trained models, each quantity [n], in the order of `names`; `left_out` says what is not among them, and why."""

    names: list[str]
    parameters: np.ndarray
    tokens: np.ndarray
    flops: np.ndarray
    loss: np.ndarray
    left_out: list[str]
    by_rule: np.ndarray | None = (
        None  # [n], whether tokens are flops / 6 / parameters for want of others; None: nowhere
    )

    @classmethod
    def of(cls, points: Sequence[Point], left_out: Sequence[str] = ()) -> Points:
        columns = {key: np.array([getattr(each, key) for each in points], float) for key in QUANTITIES}
        by_rule = np.array([each.is_by_rule for each in points], bool)
        return cls(names=[each.name for each in points], left_out=[*left_out], by_rule=by_rule, **columns)

    @property
    def tokens_by_rule(self) -> int:
        """Number of points whose tokens follow from C = 6ND, and so cannot show whether it holds."""
        return 0 if self.by_rule is None else int(np.count_nonzero(self.by_rule))

    def __len__(self) -> int:
        return len(self.names)

    def chosen(self, which: np.ndarray, left_out: Sequence[str] = ()) -> Points:
        """Points at the indices `which`, in that order."""
        columns = {key: getattr(self, key)[which] for key in QUANTITIES}
        names, by_rule = [self.names[index] for index in which], None if self.by_rule is None else self.by_rule[which]
        return Points(names=names, left_out=[*self.left_out, *left_out], by_rule=by_rule, **columns)

    def without_highest(self, count: int) -> Points:
        """Drop the `count` highest losses, which are often of models far from any sensible size (Besiroglu et al.,
        arXiv:2404.10102, leave out five). Raises UserError if that leaves none."""
        if not count:
            return self
        if count >= len(self):
            raise UserError(f"--drop-highest {count:,}: there are {len(self):,} points; leave some")
        order = np.argsort(self.loss, kind="stable")
        dropped = [f"{self.loss[index]:.3f}" for index in order[-count:]]
        remark = f"the {count:,} highest losses (--drop-highest): {abbreviated(dropped)}"
        return self.chosen(np.sort(order[:-count]), [remark])


def different(values: np.ndarray) -> int:
    """Number of different sizes or token counts; those less than 1 % apart in a row count as one."""
    gaps = np.diff(np.sort(np.log(values)))
    return int(np.count_nonzero(gaps > SAME_SIZE)) + 1 if len(values) else 0


@dataclass(frozen=True)
class CostLaw:
    """Cost of training: FLOPs = coefficient x parameters^exponent x tokens. The rule of thumb is 6 and 1."""

    coefficient: float = FLOPS_PER_PARAMETER
    exponent: float = 1.0
    largest_error: float = 0.0  # relative, over the points that it is of

    @classmethod
    def of(cls, points: Points) -> CostLaw:
        """The rule of thumb where it is exact, or a line through the logarithms: in small models, embeddings (which
        are looked up) and attention (which grows with the context) are parts that change with size."""
        ratio = points.flops / points.tokens / points.parameters
        if np.allclose(ratio, FLOPS_PER_PARAMETER, rtol=1e-6):
            return cls()
        x, y = np.log(points.parameters), np.log(ratio)
        slope = 0.0
        if different(points.parameters) > 1:
            slope = float(np.sum((x - x.mean()) * (y - y.mean())) / np.sum((x - x.mean()) ** 2))
        intercept = float(y.mean() - slope * x.mean())
        error = float(np.abs(np.expm1(y - intercept - slope * x)).max())
        return cls(math.exp(intercept), 1 + slope, error)

    @property
    def is_rule_of_thumb(self) -> bool:
        return (self.coefficient, self.exponent) == (FLOPS_PER_PARAMETER, 1.0)

    def tokens(self, flops: np.ndarray | float, parameters: np.ndarray | float) -> np.ndarray:
        """Number of tokens on which these FLOPs train models of this size."""
        return np.asarray(flops / (self.coefficient * parameters**self.exponent))

    def flops(self, parameters: float, tokens: float) -> float:
        return float(self.coefficient * parameters**self.exponent * tokens)


# From a CSV file


def read_points(path: Path) -> Points:
    """Points of a CSV file with the columns parameters, flops and loss, and perhaps tokens and name.

    Without tokens they are flops / 6 / parameters. Lines that begin with # are comments. Raises UserError naming line
    and column; lines whose loss is not finite are left out.
    """
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise UserError(f"{path}: larger than {LARGEST_FILE_BYTES // 2**20} MiB; give a file of points")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; give a CSV file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    points, lost = [], []
    for point in _points_of(path, text):
        if math.isfinite(point.loss):
            points.append(point)
        else:
            lost.append(point.name)
    if not points:
        raise UserError(f"{path}: has no points; give a line for each run below the line of column names")
    return Points.of(points, [f"{name}: its loss is not finite" for name in lost])


def _points_of(path: Path, text: str) -> Iterator[Point]:
    numbered = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    numbered = [(number, line) for number, line in numbered if not line.startswith("#")]
    try:
        rows = list(csv.reader([line for _, line in numbered], skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}: not CSV: {error}") from None
    if not rows:
        raise UserError(f"{path}: is empty; its first line must name the columns {', '.join(COLUMNS)}")
    columns = [name.strip().lower() for name in rows[0]]
    _check_columns(path, columns)
    for (number, _), row in zip(numbered[1:], rows[1:], strict=True):
        if len(row) != len(columns):
            raise UserError(f"{path}:{number}: {len(row)} values for {len(columns)} columns")
        yield _point(path, number, dict(zip(columns, row, strict=True)))


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    for name in COLUMNS:
        if name not in columns:
            near = nearest(name, columns)
            there = f"; is {near} what you mean?" if near else f"; there are: {abbreviated(columns)}"
            raise UserError(f"{path}: column {name}: missing{there}")
    for name in columns:
        meant = nearest(name, [*COLUMNS, *OTHER_COLUMNS])
        if name not in (*COLUMNS, *OTHER_COLUMNS) and meant in OTHER_COLUMNS:
            raise UserError(f"{path}: column {name}: unknown; did you mean {meant}? Rename it, or leave it out")
    if len({*columns}) < len(columns):
        raise UserError(f"{path}: a column is named twice; rename one of {abbreviated(columns)}")


def _point(path: Path, number: int, row: dict[str, str]) -> Point:
    values = {key: _number(path, number, key, row[key]) for key in (*COLUMNS, "tokens") if row.get(key, "").strip()}
    for key in COLUMNS:
        if key not in values:
            raise UserError(f"{path}:{number}: column {key}: empty; give a number")
    name = row.get("name", "").strip() or f"line {number}"
    tokens = values.get("tokens", values["flops"] / FLOPS_PER_PARAMETER / values["parameters"])
    return Point(name, values["parameters"], tokens, values["flops"], values["loss"], "tokens" not in values)


def _number(path: Path, number: int, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{path}:{number}: column {key}: {text.strip()!r} is not a number") from None
    is_lost = key == "loss" and not math.isfinite(value)  # a run that diverged: left out later
    is_possible = is_lost or 0 < value < 1e40
    if not is_possible:
        raise UserError(f"{path}:{number}: column {key}: {text.strip()} must be greater than 0 and less than 1e40")
    return value


# From run folders


def points_of_runs(runs: Sequence[RunDirectory]) -> Points:
    """The final validation losses of finished runs, over exact FLOPs; runs that have none are named in `left_out`.

    Raises UserError for runs whose losses are of different texts.
    """
    points, left_out, facts = [], [], {}
    for run in runs:
        if not run.summary.is_file():
            left_out.append(f"{run.path.name}: has not finished (no {run.summary.name})")
            continue
        try:
            summary = read_summary(run.summary)
        except UserError as error:
            left_out.append(f"{run.path.name}: {error}")
            continue
        point = _point_of_run(run.path.name, summary)
        if isinstance(point, str):
            left_out.append(f"{run.path.name}: {point}")
        else:
            points.append(point)
            facts[run.path.name] = _texts_of(summary)
    _check_alike(facts)
    if not points:
        raise UserError(f"no finished run to fit: {abbreviated(left_out, separator='; ')}")
    return Points.of(points, left_out)


def _point_of_run(name: str, summary: RunSummary) -> Point | str:
    """The run's point, or why it gives none."""
    if summary.train.get("initial_weights") is not None:
        return "begins with weights that were trained before (initial_weights), on tokens not counted here"
    if summary.active_parameters is not None:
        return "has a mixture of experts, for which laws in parameters and tokens are others"
    if summary.parameters is None or summary.flops_per_token is None or not summary.tokens_seen:
        return "its summary.json, of an earlier version, lacks parameters, FLOPs or tokens"
    if summary.final_validation_loss is None:
        return "has no finite validation loss at its end"
    if validation_text(summary.model or {}, summary.train, summary.dataset or {}) is None:
        return "does not record the text of its validation losses"
    tokens = summary.tokens_seen
    flops = float(summary.flops_per_token) * tokens
    return Point(name, summary.parameters, tokens, flops, summary.final_validation_loss)


def _texts_of(summary: RunSummary) -> dict[str, object]:
    """Facts about texts, by their names, that runs must share for one law to hold for their losses."""
    text = validation_text(summary.model or {}, summary.train, summary.dataset or {})
    trained_on = (summary.dataset or {}).get("train") or {}
    facts = {f"validation {key}": value for key, value in text._asdict().items()} if text else {}
    return {"training text (SHA-256)": trained_on.get("sha256"), **facts}


def _check_alike(facts: dict[str, dict[str, object]]) -> None:
    names = list(facts)
    for name in names[1:]:
        for key, value in facts[name].items():
            first = facts[names[0]][key]
            if value != first:
                raise UserError(
                    f"{name}: its {key} is {value}, and that of {names[0]} is {first}: one law cannot hold for both; "
                    "give runs whose losses are of the same text"
                )
