"""Report on loss as a function of size, tokens and FLOPs, as text and as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.common.messages import counted, paragraph
from harness.common.statistics import Estimate, Inconclusive
from harness.scaling.data import FLOPS_PER_PARAMETER, CostLaw, Points
from harness.scaling.isoflop import IsoFlop, Optimum
from harness.scaling.laws import HUBER_DELTA, STARTS, LawFit, Prediction, Split

SHOWN_LEFT_OUT = 8
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True)
class Analysis:
    """Everything that fit_scaling.py reports. A split is the best division of a number of FLOPs between model size and
    tokens. Without a law, `predictions` and `splits` are empty."""

    points: Points
    cost: CostLaw
    isoflop: IsoFlop | Inconclusive
    law: LawFit | Inconclusive
    predictions: list[Prediction]
    splits: list[Split]


# As text


def describe(analysis: Analysis) -> str:
    """Return the whole report as text for a terminal."""
    sections = [_describe_points(analysis), _describe_isoflop(analysis.isoflop), _describe_law(analysis)]
    if analysis.predictions or analysis.splits:
        sections.append(_describe_answers(analysis))
    return "\n\n".join("\n".join(lines) for lines in sections)


def short(value: float) -> str:
    """Format a number with three digits, and a unit or power of ten if it is 1,000 or more: 1.46M. Infinity is
    "unbounded"."""
    rounded = float(f"{value:.3g}")  # before the unit is chosen, so that 999.6 becomes 1K
    for size, unit in UNITS:
        if size <= rounded < 1000 * UNITS[0][0]:
            return f"{rounded / size:.3g}{unit}"
    return power(value)


def power(value: float, digits: int = 3) -> str:
    """Format a number with `digits` digits, and a power of ten if more stand before the decimal point: 5.76e23.
    Infinity is "unbounded"."""
    return re.sub(r"e\+0?", "e", f"{value:.{digits}g}").replace("inf", "unbounded")


def _range(values: np.ndarray, form: Callable[[float], str]) -> str:
    low, high = form(values.min()), form(values.max())
    return low if low == high else f"{low} to {high}"


def _describe_points(analysis: Analysis) -> list[str]:
    points, cost, by_rule = analysis.points, analysis.cost, analysis.points.tokens_by_rule
    losses = _range(points.loss, lambda value: f"{value:.3f}" if value < 1e6 else power(value))
    lines = [
        counted(len(points), "point"),
        f"  parameters {_range(points.parameters, short)}, tokens {_range(points.tokens, short)}",
        f"  FLOPs {_range(points.flops, power)}, loss {losses}",
    ]
    if repeated := int((points.epochs > 1).sum()):
        said = f"In {counted(repeated, 'point')}, tokens were repeated, up to {points.epochs.max():.3g} passes"
        lines += paragraph(
            f"  {said}; the laws count all tokens as new, but repeated ones teach less (arXiv:2305.16264)", indent=4
        )
    if by_rule:
        which = "" if by_rule == len(points) else f" of {counted(by_rule, 'point')}"
        lines.append(f"  Tokens{which} (not given) are FLOPs / 6 / parameters (the rule C = 6ND)")
    elif cost.is_rule_of_thumb:
        lines.append("  FLOPs are 6 x parameters x tokens in every point (the rule C = 6ND)")
    if not cost.is_rule_of_thumb:
        ratio = FLOPS_PER_PARAMETER * points.parameters * points.tokens / points.flops
        lines += [
            f"  The rule C = 6ND gives {_range(ratio, '{:.2f}'.format)} times these FLOPs",
            f"  FLOPs are about {cost.coefficient:.3g} x parameters^{cost.exponent:.3f} x tokens "
            f"(within {cost.largest_error:.1%})",
        ]
    for left_out in points.left_out[:SHOWN_LEFT_OUT]:
        lines += paragraph(f"  Left out: {left_out}", indent=4)
    if len(points.left_out) > SHOWN_LEFT_OUT:
        lines.append(f"  and {len(points.left_out) - SHOWN_LEFT_OUT:,} more")
    return lines


def _describe_isoflop(isoflop: IsoFlop | Inconclusive) -> list[str]:
    title = "Profiles of equal FLOPs: the best size in each, by a parabola over ln parameters"
    if isinstance(isoflop, Inconclusive):
        return [title, *paragraph(f"  The best sizes: {isoflop}", indent=4)]
    lines = [title, "  FLOPs      points  best size, 95 % interval     tokens  loss    scatter"]
    for profile in isoflop.profiles:
        head, optimum = f"  {power(profile.flops):<9} {len(profile.members):>7}  ", profile.optimum
        if isinstance(optimum, Inconclusive):
            lines += paragraph(f"{head}{optimum}", indent=len(head))
        else:
            best, tokens = _shortened(optimum.parameters), short(optimum.tokens.value)
            lines.append(f"{head}{best:<26}  {tokens:>7}  {optimum.loss.value:.3f}   {profile.scatter:.4f}")
    if isoflop.alone:
        lines.append(f"  {counted(isoflop.alone, 'point')} {'is' if isoflop.alone == 1 else 'are'} in no profile")
    if isinstance(isoflop.laws, Inconclusive):
        return [*lines, *paragraph(f"  Growth of the best size with FLOPs C: {isoflop.laws}", indent=4)]
    return lines + [f"  best {name:<10} ∝ C^{_interval(law.exponent)}" for name, law in isoflop.laws.items()]


def _shortened(value: Estimate) -> str:
    return f"{short(value.value)} [{short(value.low)}, {short(value.high)}]"


def _interval(value: Estimate) -> str:
    middle, low, high = (
        f"{number:.3f}" if abs(number) < 1e6 else power(number) for number in (value.value, value.low, value.high)
    )
    return f"{middle} [{low}, {high}]"


def _digits(value: float) -> str:
    """Format a number with up to four digits; from 1000 to 1e6, as a whole number. Infinity is "unbounded"."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else power(value, digits=4)


def _describe_law(analysis: Analysis) -> list[str]:
    law = analysis.law
    title = "L(N, D) = E + A / N^α + B / D^β, N parameters, D tokens"
    if isinstance(law, Inconclusive):
        return [title, *paragraph(f"  The law and its predictions: {law}", indent=4)]
    lines = [
        title,
        f"  Huber loss of ln L, delta {HUBER_DELTA:g}; {STARTS} starts, {len(law.resampled.e):,} resamples",
        "     value       std. error  95 % interval",
    ]
    for name, each in law.coefficients().items():
        error = _digits(float(f"{each.standard_error:.3g}"))  # a standard error is not known to more than three digits
        lines.append(f"  {name}  {_digits(each.value):<10}  {error:<10}  [{_digits(each.low)}, {_digits(each.high)}]")
    spread = float(np.sqrt(np.mean(law.residuals**2)))
    return [
        *lines,
        f"  Losses differ from the law by {spread:.2%} (root mean square), {np.abs(law.residuals).max():.2%} at most",
        f"  best parameters ∝ C^{_interval(law.size_exponent(analysis.cost))}",
    ]


def _describe_answers(analysis: Analysis) -> list[str]:
    said = ["Predicted by the law, with 95 % intervals (those of losses are for a single run)"]
    answers: list[Prediction | Split] = [*analysis.predictions, *analysis.splits]
    for each in answers:
        loss, flops = _interval(each.loss), f"{power(each.flops)} FLOPs"
        if isinstance(each, Split):
            said += [
                f"  best split of {flops}: loss {loss}",
                f"    parameters {_shortened(each.parameters)}",
                f"    tokens     {_shortened(each.tokens)}",
            ]
        else:
            name = f"{each.name}: " if each.name else ""
            sizes = f"{short(each.parameters)} parameters, {short(each.tokens)} tokens, {flops}"
            said += paragraph(f"  {name}{sizes}: loss {loss}", indent=4)
        if each.beyond_the_points:
            where = "; ".join(each.beyond_the_points)
            extrapolated = f"    EXTRAPOLATED ({where}): the interval is valid only if the law holds there"
            said += paragraph(extrapolated, indent=6)
    return said


# As JSON


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Return the whole report as JSON. An inconclusive result is {"inconclusive": reason}; an unbounded number is
    null."""
    points, isoflop, law = analysis.points, analysis.isoflop, analysis.law
    profiles: Any = isoflop
    if isinstance(isoflop, IsoFlop):
        laws: Any = isoflop.laws
        if isinstance(laws, dict):
            laws = {f"{name}_exponent": each.exponent for name, each in laws.items()}
        profiles = {
            "profiles": [
                {
                    "flops": each.flops,
                    "scatter": each.scatter,
                    "runs": [points.names[index] for index in each.members],
                    **_plain(each.optimum),
                }
                for each in isoflop.profiles
            ],
            "in_no_profile": isoflop.alone,
            "power_laws": laws,
        }
    coefficients: Any = law
    if isinstance(law, LawFit):
        coefficients = dict(zip(("E", "A", "B", "alpha", "beta"), law.coefficients().values(), strict=True))
        coefficients["best_parameters_exponent"] = law.size_exponent(analysis.cost)
        coefficients |= {"delta": HUBER_DELTA, "resamples": len(law.resampled.e)}

    columns = {key: getattr(points, key).tolist() for key in ("parameters", "tokens", "flops", "loss", "epochs")}
    values: dict[str, Any] = _plain(
        {
            "points": {"names": points.names, **columns, "tokens_by_rule": points.tokens_by_rule},
            "left_out": points.left_out,
            "flops": vars(analysis.cost),
            "isoflop": profiles,
            "law": coefficients,
            "predictions": [vars(each) for each in analysis.predictions],
            "best_splits": [vars(each) for each in analysis.splits],
        }
    )
    return values


def _plain(value: Any) -> Any:
    """Return a value as plain JSON: results as objects, an inconclusive result as {"inconclusive": reason}, and null
    for a number that is not finite."""
    if isinstance(value, Inconclusive):
        return {"inconclusive": value.reason}
    if isinstance(value, Estimate | Optimum):
        value = vars(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
