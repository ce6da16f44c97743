"""Points for scaling laws, from runs and CSV files: the values read, the points left out with a reason, and errors."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.common.errors import UserError
from harness.runs.directory import RunDirectory
from harness.scaling.data import CostLaw, points_of_runs, read_points
from tests.scaling.scaling import FIXTURES, SUMMARY, ladder, points_of, run_in
from tests.support.configs import refusal

# CSV files


def test_points_of_a_file(tmp_path: Path) -> None:
    """The tokens of a point are those in the file or, without such a column, FLOPs / 6 / parameters. Points whose loss
    is not finite are left out."""
    path = tmp_path / "points.csv"
    path.write_text("# source\nparameters,flops,loss\n1e6, 6e15, 3.5\n\n2e6,6e15,3.25\n2e6,6e15,nan\n2e6,6e15,inf\n")
    points = read_points(path)
    assert (points.names, points.tokens.tolist()) == (["line 3", "line 5"], [1e9, 5e8])
    assert points.left_out == ["line 6: its loss is not finite", "line 7: its loss is not finite"]
    path.write_text("name,Loss,tokens,parameters,flops\na,3.5,2e9,1e6,6e15\n")
    points = read_points(path)
    assert (points.names, points.tokens.tolist(), points.loss.tolist()) == (["a"], [2e9], [3.5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no data; its first line must name the columns parameters, flops, loss"),
        ("parameters,flops,loss\n", "no line has a finite loss"),
        ("parameters,flops,loss\n1e6,6e15,nan\n", "no line has a finite loss"),
        ("name,loss,token,flops,parameters\n", "column token: unknown; did you mean tokens?"),
        ("n,d,l\n1,2,3\n", "column parameters: missing; there are: n, d, l"),
        ("parameters,flops,loss,loss\n1,2,3,4\n", ": column loss: named twice; "),
        ("parameters,flops,loss\n1e6,6e15\n", ":2: 2 values for 3 columns"),
        ("parameters,flops,loss\n1e6,,3\n", ":2: column flops: empty"),
        ("# c\nparameters,flops,loss\n1e6,many,3\n", ":3: column flops: 'many' is not a number"),
        ("parameters,flops,loss\n-1e6,6e15,3\n", ":2: column parameters: -1e6 must be greater than 0"),
        ("parameters,flops,loss\ninf,6e15,3\n", ":2: column parameters: inf must be greater than 0 and less than 1e40"),
        ("parameters,flops,loss\n1e6,6e15,0\n", ":2: column loss: 0 must be greater than 0"),
        ('parameters,flops,loss\n"1e6,6e15,3\n', ":2: not CSV: "),
    ],
)
def test_bad_files_are_refused_with_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    (path := tmp_path / "points.csv").write_text(text)
    assert message in refusal(read_points, path, begins=str(path))


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_bytes(b"\xff\xfe\x00")
    for path, message in ((tmp_path / "points.csv", "not UTF-8"), (tmp_path, "Is a directory")):
        assert message in refusal(read_points, path, begins=str(path))


def test_the_highest_losses_are_dropped() -> None:
    points = ladder()
    kept = points.without_highest(3)
    assert sorted(kept.loss) == sorted(points.loss)[:-3]
    assert [points.names.index(name) for name in kept.names] == sorted(points.names.index(name) for name in kept.names)
    assert "the 3 highest losses (--drop-highest)" in kept.left_out[0]


# Runs


def test_runs_give_their_exact_flops(tmp_path: Path) -> None:
    points = points_of_runs([run_in(tmp_path, "a"), run_in(tmp_path, "b", final_validation_loss=2.0)])
    assert points.parameters.tolist() == [1272, 1272]
    assert points.flops.tolist() == [6912 * 1280] * 2
    assert points.loss.tolist() == [2.1043521563212075, 2.0]


# Name of a run -> changes of its summary.json, and the reason why it gives no point, as a regular expression.
LEFT_OUT: dict[str, tuple[dict[str, Any], str]] = {
    "diverged": ({"final_validation_loss": None}, "has no finite validation loss at its end"),
    "rose": ({"has_diverged": True}, "has diverged.*"),
    "tuned": ({"train": SUMMARY["train"] | {"initial_weights": "a"}}, "begins with weights that were trained before.*"),
    "changed": ({"changed": ["eps: 1 -> 2"]}, "was changed during training: eps: 1 -> 2"),
    "foreign": (
        {"trained_tokens": 640},
        "was changed during training: another program trained on the first 640 tokens",
    ),
    "bare": ({"flops_per_token": None}, "its summary.json, of an earlier version, lacks.*"),
    "experts": ({"active_parameters": 10_000}, "has a mixture of experts.*"),
    "unknown": ({"dataset": {"name": "local/a"}}, "does not record which text its validation losses were measured on"),
    "copied": ({}, "has exactly the size, tokens and loss of whole: a copy, not counted again"),
}


def test_runs_without_a_point_are_named_with_the_reason(tmp_path: Path) -> None:
    going = RunDirectory(tmp_path / "going")
    going.path.mkdir()
    older = RunDirectory(Path(shutil.copytree(FIXTURES / "older", tmp_path / "older")))
    half = run_in(tmp_path, "half")
    half.summary.write_text(half.summary.read_text()[:100])
    others = [run_in(tmp_path, name, **changes) for name, (changes, _) in LEFT_OUT.items()]
    points = points_of_runs([run_in(tmp_path, "whole"), going, half, *others])
    assert points.names == ["whole"]
    reasons = dict(text.split(": ", 1) for text in points.left_out)
    assert reasons.pop("going") == "has not finished (no summary.json)"
    assert "not valid JSON" in reasons.pop("half")
    assert reasons.keys() == LEFT_OUT.keys()
    for name, (_, reason) in LEFT_OUT.items():
        assert re.fullmatch(reason, reasons[name]), reasons[name]
    with pytest.raises(UserError, match="none of the runs gives a point: going: has not finished"):
        points_of_runs([going])
    assert len(points_of_runs([older])) == 1, "earlier versions' summaries are read"


def test_losses_at_different_context_lengths_are_not_fitted_together(tmp_path: Path) -> None:
    other = run_in(tmp_path, "b", model=SUMMARY["model"] | {"context_length": 8})
    with pytest.raises(UserError, match=r"^b: its .* and that of a is .*: one law cannot hold for both; give runs"):
        points_of_runs([run_in(tmp_path, "a"), other])


# FLOPs


def test_costs_are_by_the_rule_or_a_power_of_the_size() -> None:
    sizes = np.geomspace(1e6, 1e9, 7)
    points = points_of(sizes, np.full(7, 1e9), np.full(7, 3.0))
    points.flops[:] = 3.0 * sizes**1.04 * points.tokens
    cost = CostLaw.of(ladder())
    assert (cost.is_rule_of_thumb, cost.flops(1e9, 2e10)) == (True, 1.2e20)
    cost = CostLaw.of(points)
    assert cost.coefficient == pytest.approx(3.0)
    assert cost.exponent == pytest.approx(1.04)
    assert cost.largest_error < 1e-9
    assert cost.tokens(points.flops, sizes) == pytest.approx(points.tokens)
    points.flops[3] *= 1.1
    assert 0.05 < CostLaw.of(points).largest_error < 0.1
