"""Report on loss as a function of size, tokens and FLOPs, as text of 80 columns and as JSON."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.common.statistics import Estimate
from harness.comparison.inconclusive import Inconclusive
from harness.scaling.data import FLOPS_PER_PARAMETER, CostLaw, Points
from harness.scaling.isoflop import Grouping, IsoFlop, Profile, fit_isoflop
from harness.scaling.laws import (
    STARTS,
    Coefficient,
    LawFit,
    Plan,
    Prediction,
    Split,
    best_split,
    fit_law,
    predict,
)

WIDTH = 80
UNBOUNDED = "unbounded"
SHOWN_LEFT_OUT = 8
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True)
class Questions:
    """Questions about the points, and parameters of the analysis."""

    plans: Sequence[Plan] = ()
    budgets: Sequence[float] = ()  # FLOPs
    grouping: Grouping = field(default_factory=Grouping)
    resamples: int = 1000
    seed: int = 0


@dataclass(frozen=True)
class Analysis:
    """All answers."""

    points: Points
    cost: CostLaw
    isoflop: IsoFlop | Inconclusive
    law: LawFit | Inconclusive
    predictions: list[Prediction]  # empty if there is no law
    splits: list[Split]
    questions: Questions


def analyse(points: Points, cost: CostLaw, questions: Questions) -> Analysis:
    """Fit profiles and law, and answer the questions that the law can answer."""
    isoflop = fit_isoflop(points, cost, questions.resamples, questions.grouping, seed=questions.seed)
    law = fit_law(points, questions.resamples, seed=questions.seed)
    predictions: list[Prediction] = []
    splits: list[Split] = []
    if not isinstance(law, Inconclusive):
        predictions = [predict(law, points, plan) for plan in questions.plans]
        splits = [best_split(law, points, cost, flops) for flops in questions.budgets]
    return Analysis(points, cost, isoflop, law, predictions, splits, questions)


# As text


def describe(analysis: Analysis) -> str:
    """Everything, for a terminal."""
    sections = [
        _describe_points(analysis.points, analysis.cost),
        _describe_isoflop(analysis.isoflop),
        _describe_law(analysis),
        *([_describe_questions(analysis)] if analysis.questions.plans or analysis.questions.budgets else []),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def short(value: float) -> str:
    """Three digits and a unit: 1.46M."""
    for size, unit in UNITS:
        if size <= value < 1000 * UNITS[0][0]:
            return f"{value / size:.3g}{unit}" if value / size < 999.5 else f"{value / size:.0f}{unit}"
    return power(value)


def power(value: float) -> str:
    """Three digits and a power of ten: 5.76e23."""
    return UNBOUNDED if math.isinf(value) else re.sub(r"e\+0?", "e", f"{value:.3g}")


def _range(values: np.ndarray, form: Callable[[float], str]) -> str:
    low, high = form(values.min()), form(values.max())
    return low if low == high else f"{low} to {high}"


def _points(count: int) -> str:
    return f"{count:,} point{'' if count == 1 else 's'}"


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def _describe_points(points: Points, cost: CostLaw) -> list[str]:
    lines = [
        _points(len(points)),
        f"  parameters {_range(points.parameters, short)}, tokens {_range(points.tokens, short)}",
        f"  FLOPs {_range(points.flops, power)}, loss {_range(points.loss, _loss)}",
    ]
    by_rule = points.tokens_by_rule
    if by_rule:
        which = "" if by_rule == len(points) else f" of {_points(by_rule)}"
        lines.append(f"  Tokens{which} were not given: FLOPs / 6 / parameters (the rule C = 6ND)")
    if cost.is_rule_of_thumb and by_rule < len(points):
        which = "every other point" if by_rule else "every point"
        lines.append(f"  FLOPs are 6 x parameters x tokens in {which} (the rule C = 6ND)")
    if not cost.is_rule_of_thumb:
        ratio = FLOPS_PER_PARAMETER * points.parameters * points.tokens / points.flops
        lines += [
            f"  The rule C = 6ND gives {_range(ratio, '{:.2f}'.format)} times these FLOPs",
            f"  FLOPs are about {cost.coefficient:.3g} x parameters^{cost.exponent:.3f} x tokens "
            f"(within {cost.largest_error:.1%})",
        ]
    for left_out in points.left_out[:SHOWN_LEFT_OUT]:
        lines += _wrapped(f"Left out: {left_out}")
    if len(points.left_out) > SHOWN_LEFT_OUT:
        lines.append(f"  and {len(points.left_out) - SHOWN_LEFT_OUT:,} more")
    return lines


def _describe_isoflop(isoflop: IsoFlop | Inconclusive) -> list[str]:
    title = "Profiles of equal FLOPs: the best size in each, by a parabola over ln parameters"
    if isinstance(isoflop, Inconclusive):
        return [title, *_wrapped(f"The best sizes: {isoflop}")]
    lines = [title, "  FLOPs      points  best size, 95 % interval     tokens  loss    scatter"]
    for profile in isoflop.profiles:
        lines += _describe_profile(profile)
    if isoflop.alone:
        lines.append(f"  {_points(isoflop.alone)} {'is' if isoflop.alone == 1 else 'are'} in no profile")
    if isinstance(isoflop.laws, Inconclusive):
        return [*lines, *_wrapped(f"How the best size grows with FLOPs C: {isoflop.laws}")]
    laws = isoflop.laws
    for name, law in (("parameters", laws.parameters), ("tokens", laws.tokens), ("loss", laws.loss)):
        lines.append(f"  best {name:<10} ∝ C^{_interval(law.exponent, '.3f')}")
    return lines


def _describe_profile(profile: Profile) -> list[str]:
    head = f"  {power(profile.flops):<9} {len(profile.members):>7}  "
    optimum = profile.optimum
    if isinstance(optimum, Inconclusive):
        text = textwrap.wrap(str(optimum), WIDTH - len(head))
        return [head + text[0], *(" " * len(head) + line for line in text[1:])]
    size = optimum.parameters
    best = f"{short(size.value)} [{short(size.low)}, {short(size.high)}]"
    loss = f"{optimum.loss.value:.3f}   {profile.scatter:.4f}"
    return [f"{head}{best:<26}  {short(optimum.tokens.value):>7}  {loss}"]


def _loss(value: float) -> str:
    return f"{value:.3f}" if value < 1e6 else power(value)


def _digits(value: float) -> str:
    """Four digits, of large numbers all that stand before the point."""
    if math.isinf(value):
        return UNBOUNDED
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}".replace("e+", "e")


def _rounded(value: float) -> float:
    """Round to three digits, which is more than a standard error knows."""
    return float(f"{value:.3g}")


def _ends(value: Coefficient) -> str:
    return f"[{_digits(value.low)}, {_digits(value.high)}]"


def _interval(value: Estimate | Coefficient, form: str) -> str:
    numbers = (value.value, value.low, value.high)
    middle, low, high = (
        f"{number:{form}}" if abs(number) < 1e6 else f"{'-' if number < 0 else ''}{power(abs(number))}"
        for number in numbers
    )
    return f"{middle} [{low}, {high}]"


def _describe_law(analysis: Analysis) -> list[str]:
    law, resamples = analysis.law, analysis.questions.resamples
    title = "L(N, D) = E + A / N^α + B / D^β, N parameters, D tokens"
    if isinstance(law, Inconclusive):
        return [title, *_wrapped(f"The law: {law}")]
    lines = [
        title,
        f"  Huber loss of ln L, delta {law.delta:g}; {STARTS} starts, {resamples:,} resamples",
        "     value       std. error  95 % interval",
    ]
    for name, each in law.coefficients().items():
        values = [f"{_digits(value):<10}" for value in (each.value, _rounded(each.standard_error))]
        lines.append(f"  {name}  {'  '.join(values)}  {_ends(each)}")
    spread = float(np.sqrt(np.mean(law.residuals**2)))
    exponent = law.size_exponent(analysis.cost)
    return [
        *lines,
        f"  Points lie {spread:.2%} from it (root mean square), {np.abs(law.residuals).max():.2%} at most",
        f"  best parameters ∝ C^{_interval(exponent, '.3f')}",
    ]


def _describe_questions(analysis: Analysis) -> list[str]:
    if isinstance(analysis.law, Inconclusive):
        return ["Predicted losses: inconclusive, because there is no law to tell them by"]
    lines = ["Predicted by the law, with the 95 % interval of a single run"]
    for prediction in analysis.predictions:
        plan = prediction.plan
        loss = f"loss {_interval(prediction.loss, '.3f')}"
        sizes = f"{short(plan.parameters)} parameters, {short(plan.tokens)} tokens, {power(plan.flops)} FLOPs"
        lines += _wrapped(f"{plan.name + ': ' if plan.name else ''}{sizes}: {loss}")
        lines += _describe_beyond(prediction)
    for split in analysis.splits:
        lines.append(f"  best split of {power(split.flops)} FLOPs: loss {_interval(split.prediction.loss, '.3f')}")
        for name, value in (("parameters", split.parameters), ("tokens", split.tokens)):
            lines.append(f"    {name:<10} {short(value.value)} [{short(value.low)}, {short(value.high)}]")
        lines += _describe_beyond(split.prediction)
    return lines


def _describe_beyond(prediction: Prediction) -> list[str]:
    if not prediction.beyond:
        return []
    where = "; ".join(prediction.beyond)
    return _wrapped(f"EXTRAPOLATED ({where}): the interval does not know whether the law holds there", indent="    ")


# As JSON


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Everything, for programs: an inconclusive result is {"inconclusive": reason}, and an interval's end or a standard
    error that is beyond all bounds is null."""
    points = analysis.points
    columns = {key: getattr(points, key).tolist() for key in ("parameters", "tokens", "flops", "loss")}
    return {
        "points": {"names": points.names, **columns, "tokens_by_rule": points.tokens_by_rule},
        "left_out": points.left_out,
        "flops": vars(analysis.cost),
        "isoflop": _json_of_isoflop(analysis),
        "law": _json_of_law(analysis),
        "predictions": [_json_of_prediction(each) for each in analysis.predictions],
        "best_splits": [
            {
                "flops": split.flops,
                "parameters": _json_of(split.parameters),
                "tokens": _json_of(split.tokens),
                **{key: _json_of_prediction(split.prediction)[key] for key in ("loss", "beyond_the_points")},
            }
            for split in analysis.splits
        ],
    }


def _json_of(value: Estimate | Coefficient) -> dict[str, float | None]:
    return {key: number if math.isfinite(number) else None for key, number in vars(value).items()}


def _untold(value: Inconclusive) -> dict[str, Any]:
    return {"inconclusive": value.reason}


def _json_of_isoflop(analysis: Analysis) -> dict[str, Any]:
    isoflop = analysis.isoflop
    if isinstance(isoflop, Inconclusive):
        return _untold(isoflop)
    profiles = []
    for profile in isoflop.profiles:
        told: dict[str, Any] = {"flops": profile.flops, "scatter": profile.scatter}
        told["runs"] = [analysis.points.names[index] for index in profile.members]
        optimum = profile.optimum
        if isinstance(optimum, Inconclusive):
            told |= _untold(optimum)
        else:
            told |= {key: vars(value) for key, value in vars(optimum).items()}
        profiles.append(told)
    laws = isoflop.laws
    if isinstance(laws, Inconclusive):
        exponents = _untold(laws)
    else:
        exponents = {f"{key}_exponent": vars(law.exponent) for key, law in vars(laws).items()}
    return {"profiles": profiles, "in_no_profile": isoflop.alone, "power_laws": exponents}


def _json_of_law(analysis: Analysis) -> dict[str, Any]:
    law = analysis.law
    if isinstance(law, Inconclusive):
        return _untold(law)
    names = {"E": "E", "A": "A", "B": "B", "α": "alpha", "β": "beta"}
    return {
        **{names[name]: _json_of(each) for name, each in law.coefficients().items()},
        "best_parameters_exponent": _json_of(law.size_exponent(analysis.cost)),
        "delta": law.delta,
        "resamples": analysis.questions.resamples,
    }


def _json_of_prediction(prediction: Prediction) -> dict[str, Any]:
    plan = {key: None if value == math.inf else value for key, value in vars(prediction.plan).items()}
    return {**plan, "loss": _json_of(prediction.loss), "beyond_the_points": prediction.beyond}
