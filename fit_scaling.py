"""Scaling laws of loss, size, tokens and compute, fitted to finished runs or to points in a CSV file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.common.errors import UserError
from harness.common.options import RUNS_DIR, Command, FiniteNumber

if TYPE_CHECKING:
    from harness.scaling.data import CostLaw, Points
    from harness.scaling.laws import Plan

FILE = click.Path(path_type=Path, dir_okay=False)
QUANTITY = FiniteNumber(min=0, min_open=True, max=1e40)
FORMATS = (".png", ".pdf", ".svg")


@click.command(cls=Command)
@click.argument("runs", nargs=-1)
@click.option(
    "--points",
    type=FILE,
    help="CSV file to fit instead of RUNS; columns: parameters, flops, loss, optionally tokens and name.",
)
@click.option("--drop-highest", type=click.IntRange(0), default=0, metavar="K", help="Leave out the K highest losses.")
@click.option(
    "--predict",
    multiple=True,
    metavar="PLAN",
    help="Predict the loss of parameters=N,tokens=D or a run; can be given several times.",
)
@click.option(
    "--budget",
    type=QUANTITY,
    multiple=True,
    help="Print the best model size and number of tokens for this many FLOPs; can be given several times.",
)
@click.option(
    "--tolerance",
    type=FiniteNumber(0, 1),
    default=0.05,
    show_default=True,
    help="Group runs into one isoFLOP profile if their FLOPs lie within this fraction of a common value.",
)
@click.option(
    "--least-sizes",
    type=click.IntRange(3),
    default=4,
    show_default=True,
    help="Smallest number of model sizes that make a profile.",
)
@click.option(
    "--resamples",
    type=click.IntRange(100, 100_000),
    default=1000,
    show_default=True,
    help="Number of resamples for the intervals.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the resamples.")
@click.option("--chart", type=FILE, help="Draw points and laws into this file (png, pdf or svg).")
@click.option("--json", is_flag=True, help="Print JSON.")
@RUNS_DIR
def main(runs: tuple[str, ...], points: Path | None, **options: Any) -> None:
    """Fit scaling laws to the final validation losses of RUNS: names of folders in --runs-dir, or patterns like
    'ladder-*'.

    \b
    Prints, with 95% intervals:
    - isoFLOP profiles: the best model size at each compute budget
    - power laws of the best size, its number of tokens and its loss
    - the law L(N, D) = E + A/N^alpha + B/D^beta

    Runs that give no point, such as unfinished runs, are left out. --json has the reason for each.
    """
    from harness.common.files import check_writable
    from harness.scaling.data import CostLaw
    from harness.scaling.isoflop import fit_isoflop
    from harness.scaling.laws import LawFit, best_split, fit_law, predict
    from harness.scaling.report import Analysis, as_json, describe

    if chart := options["chart"]:
        if chart.suffix.lower() not in FORMATS:
            raise UserError(f"--chart {chart}: name a file that ends in {', '.join(FORMATS)}")
        check_writable(chart.parent)  # before the fits, which take a long time
    given = load_points(runs, points, options["runs_dir"]).without_highest(options["drop_highest"])
    cost = CostLaw.of(given)
    plans = [plan_of(text, options["runs_dir"], cost, given.trained_on) for text in options["predict"]]
    drawn = {"resamples": options["resamples"], "seed": options["seed"]}
    tolerance, least_sizes = options["tolerance"], options["least_sizes"]
    isoflop = fit_isoflop(given, cost, tolerance=tolerance, least_sizes=least_sizes, **drawn)
    law = fit_law(given, **drawn)
    predictions, splits = [], []
    if isinstance(law, LawFit):
        predictions = [predict(law, given, plan) for plan in plans]
        splits = [best_split(law, given, cost, flops) for flops in options["budget"]]
    analysis = Analysis(given, cost, isoflop, law, predictions, splits)
    if chart:
        from harness.scaling.charts import draw_scaling_chart

        draw_scaling_chart(analysis, chart)
    if options["json"]:
        click.echo(json.dumps(as_json(analysis), indent=2, allow_nan=False))
    else:
        click.echo(describe(analysis))


def load_points(runs: tuple[str, ...], points: Path | None, runs_dir: Path) -> Points:
    """Return the points of the runs named `runs` (`points_of_runs`) or of the CSV file `points` (`read_points`). Also
    raises UserError if both or neither are given."""
    from harness.runs.directory import RunDirectory
    from harness.scaling.data import points_of_runs, read_points

    if points is not None and runs:
        raise UserError("--points and RUNS: give one of them")
    if points is not None:
        return read_points(points)
    if not runs:
        raise UserError("give the runs to fit, or --points with a CSV file")
    folders = {run.path.resolve(): run for name in runs for run in RunDirectory.find_all(runs_dir, name)}
    return points_of_runs(list(folders.values()))  # each run once


def plan_of(text: str, runs_dir: Path, cost: CostLaw, trained_on: tuple[object, object] | None) -> Plan:
    """Return the training that a value of --predict names.

    `text` is this value, such as a run's name or `parameters=1e9,tokens=2e10`. `cost` and `trained_on` belong to the
    Points that the law is fitted to. Raises UserError if the text or the run is wrong, if the law does not hold for the
    run, or if the run's tokens are not known.
    """
    from harness.comparison.records import RunRecord
    from harness.model.config import load_model_config
    from harness.runs.budget import stated_tokens, wanted_tokens
    from harness.runs.directory import RunDirectory
    from harness.runs.train_config import load_train_config
    from harness.scaling.laws import Plan

    if "=" in text:
        parts = [part.partition("=")[::2] for part in text.replace(" ", "").split(",")]
        if sorted(key for key, _ in parts) != ["parameters", "tokens"]:
            raise UserError(f"--predict {text}: write parameters=NUMBER,tokens=NUMBER, or the name of a run")
        numbers: dict[str, float] = {}
        for key, number in parts:
            try:
                numbers[key] = QUANTITY.convert(number, None, None)
            except click.BadParameter:
                raise UserError(f"--predict {text}: {key} must be a number greater than 0, and at most 1e40") from None
        return Plan("", **numbers, flops=cost.flops(**numbers))
    run = RunDirectory.find(runs_dir, text)
    model, train = load_model_config(run.model_json), load_train_config(run.train_json)
    remedy = "give --predict parameters=NUMBER,tokens=NUMBER instead of the run"
    if model.moe is not None:
        raise UserError(f'{run.model_json}: key "moe": the laws hold only for dense models; {remedy}')
    if train.initial_weights is not None:
        raise UserError(f'{run.train_json}: key "initial_weights": the laws hold only without it; {remedy}')
    own = (train.model_dump(mode="json")["dataset"], model.context_length)
    for key, theirs, mine in zip(("dataset", "context_length"), trained_on or own, own, strict=True):
        if theirs != mine:
            raise UserError(
                f"--predict {text}: its {key} is {json.dumps(mine)}, not {json.dumps(theirs)} "
                f"as in the fitted runs; {remedy}"
            )
    # If the budget's tokens depend on the number of ranks, they are known once the run has begun and recorded them.
    wanted = stated_tokens(train, model)
    wanted = wanted or wanted_tokens(train.model_dump(mode="json"), RunRecord.read(run).recorded("budget"))
    if wanted is None:
        said = f'key "{train.budget_key}": {getattr(train, train.budget_key)} does not determine the number of tokens'
        raise UserError(f"{run.train_json}: {said}; {remedy}")
    return Plan(run.path.name, model.parameters, wanted, float(model.flops_per_token) * wanted)


if __name__ == "__main__":
    main()
