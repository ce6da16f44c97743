"""compare_runs.py's options: what is asked for, and which of them mean nothing together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import UserError


@dataclass(frozen=True)
class CompareOptions:
    """By the names of the options."""

    runs_dir: Path
    baseline: str | None = None
    sort: str | None = None
    machines: bool = False
    prices: Path | None = None
    as_json: bool = False

    def check(self, runs: tuple[str, ...]) -> None:
        """Raises UserError for options that mean nothing together, or without the runs they need."""
        if self.prices is not None and not self.machines:
            raise UserError("--prices belongs with --machines")
        if self.machines and self.as_json:
            raise UserError("--machines and --json: give one of them")
        if self.machines and not runs:
            raise UserError("--machines: name the runs to project; the speeds of the others are used without that")
