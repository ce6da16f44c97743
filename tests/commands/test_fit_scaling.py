"""fit_scaling.py: what it prints, draws and refuses, run as users do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.scaling import laws
from harness.scaling.data import CostLaw
from harness.scaling.isoflop import fit_isoflop
from harness.scaling.report import Analysis, as_json, describe
from tests.scaling.scaling import LAW, best_size, ladder, points_with_flops, run_in
from tests.support.in_process import run_here
from tests.support.isolation import ROOT, SHIPPED_RUNS

CHINCHILLA = os.environ.get("CHINCHILLA_POINTS", "")
fit = partial(run_here, "fit_scaling.py")


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A CSV file with 20 points of a known law, with noise, and one point of a run that diverged."""
    path = tmp_path_factory.mktemp("points") / "points.csv"
    known = ladder(0.003)
    columns = (known.parameters.tolist(), known.flops.tolist(), known.loss.tolist())
    rows = [",".join(map(repr, row)) for row in zip(*columns, strict=True)]
    path.write_text("\n".join(["parameters,flops,loss", *rows, "1e9,6e18,nan"]))
    return str(path)


@pytest.fixture(scope="module")
def report(points: str) -> subprocess.CompletedProcess[str]:
    """The command's output for the points and two plans. The command loads neither torch nor matplotlib."""
    arguments = ["fit_scaling.py", "--points", points, "--predict", "parameters=3e8,tokens=1e10", "--budget", "1e19"]
    arguments += ["--predict", "quickstart-gpt2", "--runs-dir", str(SHIPPED_RUNS), "--resamples", "100"]
    program = (
        "import runpy, sys\n"
        f"sys.argv = {arguments}\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    assert not {'torch', 'matplotlib'} & sys.modules.keys()\n"
    )
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=100, text=True)


def test_points_of_a_known_law_are_told_in_eighty_columns(report: subprocess.CompletedProcess[str]) -> None:
    assert report.stderr == ""
    assert max(map(len, report.stdout.splitlines())) <= 80
    assert report.stdout.startswith("20 points\n")
    assert "Left out: line 22: its loss is not finite" in report.stdout
    assert "  Tokens (not given) are FLOPs / 6 / parameters (the rule C = 6ND)\n" in report.stdout
    assert "in every point" not in report.stdout, "tokens computed by the rule cannot confirm it"
    assert "300M parameters, 10B tokens, 1.8e19 FLOPs: loss 2." in report.stdout
    assert "best split of 1e19 FLOPs: loss " in report.stdout
    planned = "quickstart-gpt2: 1.46M parameters, 1.6M tokens, "
    inside, beyond = report.stdout.split(planned)
    assert "EXTRAPOLATED" not in inside
    assert "EXTRAPOLATED (parameters " in beyond, "what is predicted of a run that is planned is read from its files"


# Losses of five model sizes at each of four numbers of FLOPs. In the best fit, the exponent of parameters is 0.01.
HARDLY_FALLING = [
    *(423.3, 418.3, 413.1, 412.2, 411.8),
    *(419.3, 417.2, 413.4, 410.4, 405.6),
    *(419.7, 415.5, 410.4, 410.1, 404.0),
    *(420.7, 415.4, 413.2, 408.7, 404.0),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["huge", "flat"])
def test_resamples_beyond_all_bounds_give_no_warning_and_no_nan(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No warning and no NaN is printed if the fits of some resamples overflow. They do so after one loss of 1e30, and
    for losses that hardly fall with size."""
    from harness.scaling.charts import draw_scaling_chart  # loads matplotlib

    monkeypatch.setattr(laws, "FLOORS", (0.5, 0.95))  # 8 starts in place of 48
    monkeypatch.setattr(laws, "PARTS", (0.5,))
    known = ladder(0.003)
    parameters, flops, losses = known.parameters, known.flops, known.loss.copy()
    if kind == "huge":
        losses[3] = 1e30
    else:
        parameters, losses = np.tile(np.geomspace(1e6, 1e8, 5), 4), np.array(HARDLY_FALLING)
        flops = np.repeat(1e15 * 4.0 ** np.arange(4), 5)
    given = points_with_flops(parameters, flops / 6 / parameters, flops, losses)
    law, cost = laws.fit_law(given, resamples=100, seed=0), CostLaw()
    assert isinstance(law, laws.LawFit)
    predictions = [laws.predict(law, given, laws.Plan("", 1e3, 1e3, 6e6))]
    splits = [laws.best_split(law, given, cost, 1e13)]
    isoflop = fit_isoflop(given, cost, tolerance=0.05, least_sizes=4, resamples=1000, seed=0)
    analysis = Analysis(given, cost, isoflop, law, predictions, splits)
    text = describe(analysis)
    assert "unbounded" in text
    assert "nan" not in text
    assert max(map(len, text.splitlines())) <= 80
    json.dumps(as_json(analysis), allow_nan=False)
    draw_scaling_chart(analysis, tmp_path / "chart.png")


def test_a_single_point_is_one_and_tokens_that_were_given_show_whether_the_rule_holds(tmp_path: Path) -> None:
    file = tmp_path / "points.csv"
    file.write_text("parameters,flops,loss,tokens\n1e6,6e12,3.5,1e6\n")
    lines = fit("--points", str(file), "--resamples", "100").stdout.splitlines()
    assert lines[:4] == [
        "1 point",
        "  parameters 1M, tokens 1M",
        "  FLOPs 6e12, loss 3.500",
        "  FLOPs are 6 x parameters x tokens in every point (the rule C = 6ND)",
    ]
    assert "need at least 9 points (given: 1)" in " ".join(map(str.strip, lines))
    file.write_text("parameters,flops,loss,tokens\n1e6,6e12,3.5,1e6\n1e6,6e12,3.4,\n2e6,12e12,3.3,\n")
    lines = fit("--points", str(file), "--resamples", "100").stdout.splitlines()
    assert lines[3:5] == ["  Tokens of 2 points (not given) are FLOPs / 6 / parameters (the rule C = 6ND)", ""]
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.slow
def test_json_has_all_numbers_and_the_seed_decides_them(
    points: str, report: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    chart = tmp_path / "c.svg"
    asked = ("--points", points, "--budget", "1e21", "--resamples", "100", "--json", "--chart", str(chart))
    told = json.loads(fit(*asked).stdout)
    assert told["law"]["alpha"]["low"] < LAW.alpha < told["law"]["alpha"]["high"]
    assert "α  {value:.4g} ".format(**told["law"]["alpha"]) in report.stdout
    assert "[{low:.4g}, {high:.4g}]".format(**told["law"]["alpha"]) in report.stdout
    assert len(told["isoflop"]["profiles"]) == 4
    (split,) = told["best_splits"]
    assert split["parameters"]["low"] < best_size(1e21) < split["parameters"]["high"]
    assert split["beyond_the_points"] == ["FLOPs 15.6 times the largest"]
    assert chart.read_bytes().startswith(b"<?xml"), "the file name decides the image format"
    assert os.listdir(tmp_path) == ["c.svg"]


@pytest.mark.slow
def test_runs_too_alike_are_told_that_they_tell_nothing_and_are_drawn_all_the_same(tmp_path: Path) -> None:
    for index in range(9):
        run_in(tmp_path, f"r{index}", final_validation_loss=2 + index / 10)
    (tmp_path / "going").mkdir()
    names = [*(f"r{index}" for index in range(9)), "going", "r0"]
    chart = str(tmp_path / "c.pdf")
    done = fit(*names, "--runs-dir", str(tmp_path), "--predict", "parameters=1e6,tokens=1e8", "--chart", chart)
    assert done.stdout.startswith("9 points\n"), "a run that is named twice counts once"
    assert "Left out: going: has not finished (no summary.json)" in done.stdout
    assert "FLOPs 8.85e6, loss 2.000 to 2.800\n" in done.stdout
    assert "The rule C = 6ND gives 1.10 times these FLOPs" in done.stdout
    assert "The best sizes: inconclusive, because no group of 4 sizes" in " ".join(done.stdout.split())
    said = "The law and its predictions: inconclusive, because it needs at least 3 different sizes (given: 1)"
    assert said in " ".join(done.stdout.split())
    assert Path(chart).read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("file", "changed", "says"),
    [
        ("train", {"initial_weights": "model.safetensors"}, "the laws hold only without it"),
        ("train", {"dataset": "local/other"}, 'dataset is "local/other", not "local/letters" as in the fitted runs'),
        ("model", {"context_length": 32}, "its context_length is 32, not 16 as in the fitted runs"),
        ("model", {"moe": {"num_experts": 4, "num_active_experts": 2}}, "the laws hold only for dense models"),
    ],
    ids=["initial_weights", "dataset", "context_length", "experts"],
)
def test_a_run_for_which_the_laws_do_not_hold_is_not_predicted(
    tmp_path: Path, file: str, changed: dict[str, Any], says: str
) -> None:
    run = run_in(tmp_path, "done")
    summary = json.loads(run.summary.read_text())
    planned = tmp_path / "planned"
    planned.mkdir()
    for part in ("model", "train"):
        (planned / f"{part}.json").write_text(json.dumps(summary[part] | (changed if part == file else {})))
    done = fit("done", "--predict", "planned", "--runs-dir", str(tmp_path), status=2)
    done.refuses(says, "give --predict parameters=NUMBER,tokens=NUMBER instead")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("rows", "axes"),
    [
        ([f"{n}e8,1e19,{3 + (n - 3) ** 2 / 50}" for n in range(1, 8)], 3),
        ([f"1e8,{n}e18,{4 - n / 10}" for n in range(1, 8)], 2),
    ],
    ids=["one number of FLOPs", "one size"],
)
def test_points_that_are_alike_are_drawn_without_a_warning(tmp_path: Path, rows: list[str], axes: int) -> None:
    """Sizes have two axes, and a color scale if there are several."""
    points, chart = tmp_path / "points.csv", tmp_path / "c.svg"
    points.write_text("\n".join(["parameters,flops,loss", *rows]))
    fit("--points", str(points), "--resamples", "100", "--chart", str(chart))
    assert chart.read_text().count(">parameters</text>") == axes


@pytest.mark.slow
def test_the_axis_of_the_best_is_labeled_for_what_it_shows(tmp_path: Path) -> None:
    """It needs more labels than the wider range of all points would."""
    points, chart = tmp_path / "points.csv", tmp_path / "c.svg"
    plans = [
        (c, best_size(c) * 4.0**n, 3 - np.log10(c / 1e18) + n**2) for c in (1e18, 4e18, 1.6e19) for n in range(-3, 4)
    ]
    points.write_text("\n".join(["flops,parameters,loss", *(",".join(map(str, plan)) for plan in plans)]))
    fit("--points", str(points), "--resamples", "100", "--chart", str(chart))
    [panel] = [part for part in chart.read_text().split('<g id="axes_') if ">tokens</text>" in part]
    assert len(re.findall(r">[0-9.]+[KMBT]</text>", panel)) >= 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give the runs to fit, or --points with a CSV file"),
        (("a", "--points", "POINTS"), "--points and RUNS: give one of them"),
        (("--points", "/nowhere.csv"), "/nowhere.csv: no such file"),
        (("--points", "POINTS", "--predict", "tokens=3"), "write parameters=NUMBER,tokens=NUMBER"),
        (("--points", "POINTS", "--predict", "parameters=1e9,parameters=2e9,tokens=3"), "write parameters=NUMBER"),
        (("--points", "POINTS", "--predict", "parameters=x,tokens=3"), "parameters must be a number"),
        (("--points", "POINTS", "--predict", "parameters=-1,tokens=3"), "parameters must be a number greater than 0"),
        (("--points", "POINTS", "--predict", "quickstrat", "--runs-dir", "RUNS"), "did you mean quickstart?"),
        (("--points", "POINTS", "--chart", "c.txt"), "--chart c.txt: name a file that ends in .png, .pdf, .svg"),
        (("--points", "POINTS", "--chart", "/nowhere/c.png"), "/nowhere: no file can be written there"),
        (("--points", "POINTS", "--chart", "FOLDER"), "folder.png' is a directory"),
        (("--points", "POINTS", "--drop-highest", "20"), "--drop-highest 20: there are 20 points"),
        (("quickstart", "--runs-dir", "RUNS"), "none of the runs gives a point: quickstart: has not finished"),
    ],
)
def test_what_cannot_be_done_is_one_line(points: str, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    folder = tmp_path / "folder.png"
    folder.mkdir()
    places = {"POINTS": points, "RUNS": str(SHIPPED_RUNS), "FOLDER": str(folder)}
    done = fit(*(places.get(word, word) for word in arguments), status=2)
    assert done.stdout == ""
    done.refuses(message)


@pytest.mark.parametrize("header", ["Model Size,Training FLOP,loss", ",Model Size,Training Tokens,Training FLOP,loss"])
def test_the_published_points_are_read_with_the_documented_names(tmp_path: Path, header: str) -> None:
    shown = (ROOT / "docs" / "scaling.md").read_text()
    (expression,) = re.findall(r"^    sed '(.*)' ", shown, re.M)
    values = {"": "0", "Model Size": "1e9", "Training Tokens": "1e9", "Training FLOP": "6e18", "loss": "2.5"}
    rows = [header, *[",".join(values[name] for name in header.split(","))] * 2]
    (tmp_path / "published.csv").write_text("\n".join(rows) + "\n")
    renamed = subprocess.run(["sed", expression, tmp_path / "published.csv"], capture_output=True, check=True).stdout
    (tmp_path / "points.csv").write_bytes(renamed)
    assert fit("--points", str(tmp_path / "points.csv"), "--resamples", "100").stdout.startswith("2 points\n")


@pytest.mark.skipif(not CHINCHILLA, reason="CHINCHILLA_POINTS names no file with the 245 published points")
def test_the_published_points_give_the_published_laws_and_the_documented_output() -> None:
    """The published points give table 1 of Besiroglu et al. (arXiv:2404.10102), table 2 of Hoffmann et al.
    (arXiv:2203.15556), and the output in docs/scaling.md."""
    asked = ("--points", CHINCHILLA, "--drop-highest", "5", "--least-sizes", "6", "--resamples", "1000")
    told = json.loads(fit(*asked, "--json").stdout)
    assert len(told["points"]["names"]) == 240
    law, isoflop = told["law"], told["isoflop"]
    for name, value, error in (
        *(("E", 1.8172, 0.03), ("A", 482.01, 124.58), ("B", 2085.43, 1293.23)),
        *(("alpha", 0.3478, 0.02), ("beta", 0.3658, 0.02)),
    ):
        assert abs(law[name]["value"] - value) < error, name
        assert law[name]["standard_error"] == pytest.approx(error, rel=0.35), name
    assert law["best_parameters_exponent"]["value"] == pytest.approx(0.5126, abs=0.005)
    assert law["best_parameters_exponent"]["standard_error"] == pytest.approx(0.02, abs=0.005)
    assert len(isoflop["profiles"]) == 9, "as many as they trained"
    assert isoflop["power_laws"]["parameters_exponent"]["value"] == pytest.approx(0.49, abs=0.01)
    assert isoflop["power_laws"]["tokens_exponent"]["value"] == pytest.approx(0.51, abs=0.01)
    shown = (ROOT / "docs" / "scaling.md").read_text()
    for line in (
        *("C^{:.3f}".format(each["value"]) for each in isoflop["power_laws"].values()),
        *(f"  {name}  {law[key]['value']:.4g} " for name, key in (("E", "E"), ("A", "A"), ("α", "alpha"), ("B", "B"))),
    ):
        assert line in shown
