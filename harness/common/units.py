"""Units of numbers in messages and options."""

from __future__ import annotations

import math

GIB = 2**30
LEAST_CENTS = 2  # least number of decimal places of an amount of money
SMALLEST_AMOUNT = 1e-9  # dollars; smaller amounts are shown as 0.00


def amount_text(dollars: float) -> str:
    """Format dollars to the cent, or below ten cents to two significant digits, so that a small amount is not shown as
    0.00: 0.0123 -> "0.012"."""
    size = abs(dollars)
    digits = 1 - math.floor(math.log10(size)) if SMALLEST_AMOUNT <= size < math.inf else LEAST_CENTS
    return f"{dollars:,.{max(LEAST_CENTS, digits)}f}"


def duration(seconds: float) -> str:
    """Format seconds as hours, or as seconds if there are fewer than 600."""
    return f"{seconds / 3600:,.2f} h" if seconds >= 600 else f"{seconds:,.0f} s"
