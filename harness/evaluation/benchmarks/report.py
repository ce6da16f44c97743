"""Results of benchmarks: a table for a terminal of 80 columns, and everything as a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.common.errors import RunError, UserError
from harness.common.files import replace_text
from harness.evaluation.benchmarks.run import Score, scores
from harness.evaluation.benchmarks.tasks import Benchmarks

NAME_WIDTH, METRIC_WIDTH, VALUE_WIDTH, COUNT_WIDTH = 32, 18, 19, 8
KEPT = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")


def table(results: dict[str, Any], benchmarks: Benchmarks) -> Iterator[str]:
    """The lines of a table: task, metric, value and standard error, number of examples; a group's tasks indented."""
    yield _line("task", "metric", "value ± error", "examples")
    for name, depth in _in_order(benchmarks.asked, results.get("group_subtasks", {}), 0):
        rows = scores(results, name)
        shown = _fitted("  " * depth + name, NAME_WIDTH)
        if not rows:
            yield shown
        for score in rows:
            yield _line(shown, _fitted(score.metric, METRIC_WIDTH), described(score), f"{score.examples:,}")
            shown = ""


def described(score: Score) -> str:
    """The value and its standard error, 0.2867 ± 0.0045."""
    error = "" if score.stderr is None or not math.isfinite(score.stderr) else f" ± {_eight_characters(score.stderr)}"
    return _eight_characters(score.value) + error


def check_output(path: Path) -> None:
    """Raise UserError, before hours of work, if no file can be written there."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; --output is a file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path.parent}: no such folder; --output is a file in one that there is")


def write_results(path: Path, results: dict[str, Any], about: dict[str, Any]) -> None:
    """Write `about` (the model and the settings) and lm-eval's results as one JSON object. Raises RunError."""
    from importlib.metadata import version

    whole = {"lm_eval": version("lm-eval"), **about, **{key: results[key] for key in KEPT if key in results}}
    text = json.dumps(_as_json(whole), indent=2, ensure_ascii=False, allow_nan=False)
    try:
        replace_text(path, text + "\n")
    except OSError as error:
        raise RunError(f"{path}: cannot write the results: {error.strerror}") from None


def _in_order(names: list[str], children: dict[str, list[str]], depth: int) -> Iterator[tuple[str, int]]:
    """Yield names and depths, a group before its members."""
    for name in names:
        yield name, depth
        yield from _in_order(children.get(name, []), children, depth + 1)


def _line(name: str, metric: str, value: str, count: str) -> str:
    return f"{name:<{NAME_WIDTH}} {metric:<{METRIC_WIDTH}} {value:>{VALUE_WIDTH}} {count:>{COUNT_WIDTH}}"


def _fitted(text: str, width: int) -> str:
    """Cut `text` to a column's width."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _eight_characters(value: float) -> str:
    """A number in at most so many."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.5g}" if abs(value) < 1e5 else f"{value:.3g}"


def _as_json(value: Any) -> Any:
    """The value in JSON's types: NumPy's numbers as Python's, not finite ones as null, anything else as text."""
    if isinstance(value, dict):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_as_json(each) for each in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
