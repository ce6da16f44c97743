"""What stands in place of a result that the data at hand do not give: an interval of too few windows, a fit of too few
points, a speed that nobody has measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CannotBeTold:
    """Returned, not raised: that something cannot be told is an answer, beside which others may stand. `reason`
    completes "cannot be told, because"; as text, it is all of that."""

    reason: str

    def __str__(self) -> str:
        return f"cannot be told, because {self.reason}"
