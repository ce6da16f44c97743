"""The result that data do not give: an interval of too few windows, a fit of too few points, a speed never measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inconclusive:
    """Returned, not raised: other results may stand beside it. As text, "inconclusive, because" and the reason."""

    reason: str

    def __str__(self) -> str:
        return f"inconclusive, because {self.reason}"
