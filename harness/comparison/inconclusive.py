"""Result of a question that the data cannot answer, such as an interval from too few windows or a fit to too few
points."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inconclusive:
    """The reason why there is no result. Functions return it instead of raising, so that other results can be shown
    beside it. As text: "inconclusive, because" and the reason."""

    reason: str

    def __str__(self) -> str:
        return f"inconclusive, because {self.reason}"
