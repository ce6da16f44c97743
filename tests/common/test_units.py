"""Amounts of money as messages print them."""

from __future__ import annotations

import pytest

from harness.common.units import amount_text


@pytest.mark.parametrize(
    ("dollars", "text"),
    [
        (0.0, "0.00"),
        (39.864, "39.86"),
        (1234.5, "1,234.50"),
        (0.1, "0.10"),
        (0.0996, "0.100"),
        (0.05, "0.050"),
        (0.0057, "0.0057"),
        (0.00494, "0.0049"),
        (-0.00494, "-0.0049"),
        (1e-12, "0.00"),
    ],
)
def test_amounts_are_to_the_cent_and_small_ones_to_two_digits(dollars: float, text: str) -> None:
    assert amount_text(dollars) == text
