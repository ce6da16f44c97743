"""Losses of several runs along an axis, and where their labels go."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.common.errors import UserError
from harness.comparison.curves import (
    AXES,
    Curve,
    CurveSource,
    choose_axis,
    curves_of,
    cut_note,
    loss_title,
    marked_points,
    shown_range,
)
from harness.runs.metrics import Event, TrainEvent, ValidationEvent


def events(losses: Sequence[float | None], kind: type[Event] = ValidationEvent, seconds: float = 36.0) -> list[Event]:
    """One every ten steps of 100 tokens, and so many seconds apart."""
    return [
        kind(global_step=10 * at, tokens_seen=1000 * at, seconds=seconds * at, loss=loss)  # type: ignore[call-arg]
        for at, loss in enumerate(losses)
    ]


RUN = CurveSource("a", events([5.0, 4.0, 3.0]), flops_per_token=7, price_per_hour=2.0)


@pytest.mark.parametrize(
    ("axis", "places"),
    [
        ("steps", [0, 10, 20]),
        ("tokens", [0, 1000, 2000]),
        ("hours", [0, 0.01, 0.02]),
        ("dollars", [0, 0.02, 0.04]),
        ("flops", [0, 7000, 14000]),
    ],
)
def test_each_axis(axis: str, places: list[float]) -> None:
    [curve], problems = curves_of([RUN], AXES[axis])
    assert curve.x == pytest.approx(places)
    assert curve.y == [5.0, 4.0, 3.0]
    assert (curve.label, curve.runs, problems) == ("a", 1, [])


def test_replicates_are_one_curve_with_a_band() -> None:
    other = CurveSource("b", events([5.0, 4.4, 3.2, 3.0], seconds=72.0))
    [curve], _ = curves_of([RUN, other], AXES["hours"], groups={"both": ["a", "b"]})
    assert curve.x == pytest.approx([0, 0.015, 0.03]), "of the points that both have"
    assert curve.y == pytest.approx([5.0, 4.2, 3.1])
    assert (curve.low, curve.high) == ([5.0, 4.0, 3.0], [5.0, 4.4, 3.2])
    assert (curve.label, curve.runs) == ("both", 2)


def test_the_lowest_comes_first() -> None:
    sources = [CurveSource("high", events([5, 4])), CurveSource("low", events([5, 3]))]
    assert [curve.label for curve in curves_of(sources, AXES["steps"])[0]] == ["low", "high"]


def test_losses_of_the_kind_that_is_asked_for() -> None:
    both = [*events([9.0, 9.0]), *events([5.0, 4.0], TrainEvent)]
    other = CurveSource("b", events([3.0, 2.0], TrainEvent))
    curves, problems = curves_of([CurveSource("a", both), other], AXES["steps"], TrainEvent)
    assert ([curve.y for curve in curves], problems) == ([[3, 2], [5, 4]], [])
    assert loss_title(curves) == "training loss (nats per token)"
    curves, problems = curves_of([CurveSource("a", both), other], AXES["steps"])
    assert [curve.y for curve in curves] == [[9, 9]]
    assert problems == ["b: nothing to draw: 0 validation losses in metrics.jsonl, and a curve takes 2"]
    assert loss_title(curves) == "validation loss (nats per token)"


def test_the_kind_of_losses_is_told_of_one_chart_only() -> None:
    two = [Curve("a", [0, 1], [2, 1], kind="training"), Curve("b", [0, 1], [2, 1], kind="validation")]
    assert loss_title(two) == "loss (nats per token)"


def test_losses_that_are_not_finite_are_left_out() -> None:
    for lost in (None, 1e308, -1e308):
        [curve], _ = curves_of([CurveSource("a", events([5.0, lost, 3.0]))], AXES["steps"])
        assert curve.x == [0, 20]


def test_what_cannot_be_drawn_is_said_and_the_rest_is_drawn() -> None:
    sources = [RUN, CurveSource("free", events([5.0, 4.0])), CurveSource("new", events([5.0]))]
    curves, problems = curves_of(sources, AXES["dollars"])
    assert [curve.label for curve in curves] == ["a"]
    assert problems == [
        'free, new: no "price_per_hour" in train.json, so that losses have no dollars',
    ]
    curves, problems = curves_of(sources, AXES["flops"])
    assert [curve.label for curve in curves] == ["a"]
    assert problems == ["free, new: FLOPs per token are not known"]
    curves, problems = curves_of(sources, AXES["tokens"])
    assert [curve.label for curve in curves] == ["a", "free"], "one that has hardly begun does not hide the others"
    assert problems == ["new: nothing to draw: 1 validation loss in metrics.jsonl, and a curve takes 2"]


def test_an_axis_that_there_is_not() -> None:
    assert choose_axis("tokens").label == "tokens seen"
    with pytest.raises(UserError, match=r'no axis "token"; there is steps, tokens, .*; did you mean tokens\?'):
        choose_axis("token")


def test_the_steep_beginning_is_cut_off() -> None:
    curve = Curve("a", [0, 1, 50, 100], [11.0, 9.0, 4.0, 3.0])
    low, high = shown_range([curve], {"a reference": 2.0})
    assert 1.8 < low < 2.0
    assert 4.0 < high < 4.2
    assert cut_note([curve], high) == "↑ cut off here: the first losses go up to 11.00"


def test_a_beginning_that_leaves_the_rest_half_of_the_height_is_shown() -> None:
    curve = Curve("a", [0, 1, 50, 100], [4.9, 4.5, 4.0, 3.0])
    low, high = shown_range([curve], {})
    assert low < 3.0
    assert high > 4.9
    assert cut_note([curve], high) == ""


def test_a_reference_that_is_far_off_does_not_squeeze_the_curves() -> None:
    curve = Curve("a", [0, 50, 100], [5.0, 4.5, 4.0])
    assert shown_range([curve], {"far": 2.0, "farther": 9.0}) == shown_range([curve], {})
    low, high = shown_range([curve], {"near": 3.2, "far": 2.0})
    assert 2.0 < low < 3.2
    assert high > 5.0


def test_the_last_point_is_marked_and_none_beyond_the_picture() -> None:
    curve = Curve("a", [float(at) for at in range(30)], [30.0 - at for at in range(30)])
    marked = marked_points(curve, (0.0, 28.5))
    assert marked[0] == (2.0, 28.0), "every second; the first lies above the picture"
    assert marked[-1] == (29.0, 1.0)
    assert all(curve.y[int(x)] == loss <= 28.5 for x, loss in marked)


@pytest.mark.parametrize(
    ("axis", "texts"),
    [
        ("hours", ["0", "0.01", "0.3", "1,250"]),
        ("dollars", ["0", "0.01", "0.3", "1,250"]),
        ("tokens", ["0", "0.01", "0.3", "1.25k"]),
    ],
)
def test_hours_and_dollars_are_plain_numbers(axis: str, texts: list[str]) -> None:
    assert [AXES[axis].number(value) for value in (0, 0.01, 0.1 + 0.2, 1250)] == texts
    assert AXES["dollars"].number(2e-05) == "0.00002"


@settings(deadline=None)  # it loads matplotlib
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12).map(sorted))
def test_labels_are_apart_and_in_order(places: list[float]) -> None:
    from harness.comparison.charts import spread  # here, since every process that runs tests loads this file

    found = spread(places, 0.05)
    assert all(after - before >= 0.05 - 1e-9 for before, after in itertools.pairwise(found))
    assert sum(found) == pytest.approx(sum(places), abs=1e-6), "none is moved further than its neighbours make it"


def test_a_label_with_room_stays_where_its_curve_ends() -> None:
    from harness.comparison.charts import spread

    assert spread([0.1, 0.5, 0.9], 0.05) == [0.1, 0.5, 0.9]
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
