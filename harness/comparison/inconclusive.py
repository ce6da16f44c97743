"""Result of a question that the data cannot answer, such as an interval from too few windows or a fit to too few
points."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inconclusive:
    """The reason why a function has no result. Functions return an object of this class instead of raising an error, so
    that other results can be shown beside it. As text, it is "inconclusive, because" and the reason."""

    reason: str

    def __str__(self) -> str:
        return f"inconclusive, because {self.reason}"
