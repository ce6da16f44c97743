"""Units that messages and options count in."""

from __future__ import annotations

import math

GIB = 2**30
LEAST_CENTS = 2  # digits behind the point of an amount of money
SMALLEST_AMOUNT = 1e-9  # dollars; less is shown as nothing


def amount_text(dollars: float) -> str:
    """To the cent; an amount below ten cents to two digits that count, so that what is small is not shown as 0.00."""
    size = abs(dollars)
    digits = 1 - math.floor(math.log10(size)) if SMALLEST_AMOUNT <= size < math.inf else LEAST_CENTS
    return f"{dollars:,.{max(LEAST_CENTS, digits)}f}"
