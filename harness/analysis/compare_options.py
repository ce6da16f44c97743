"""compare_runs.py's options: what is asked for, and which of them mean nothing together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.analysis.curves import choose_axis
from harness.common.errors import UserError
from harness.common.files import check_writable
from harness.runs.directory import RunDirectory

LARGEST_LOSS = 1000.0


@dataclass(frozen=True)
class CompareOptions:
    """By the names of the options."""

    runs_dir: Path
    baseline: str | None = None
    sort: str | None = None
    machines: bool = False
    prices: Path | None = None
    as_json: bool = False
    html: Path | None = None
    chart: Path | None = None
    over: str = "tokens"
    reference: tuple[str, ...] = ()

    def check(self, runs: tuple[str, ...]) -> None:
        """Raises UserError for options that mean nothing together, or without the runs they need."""
        if self.prices is not None and not self.machines:
            raise UserError("--prices belongs with --machines")
        if self.machines and self.as_json:
            raise UserError("--machines and --json: give one of them")
        if self.machines and not runs:
            raise UserError("--machines: name the runs to project; the speeds of the others are used without that")
        if self.reference and not (self.html or self.chart):
            raise UserError("--reference belongs with --html or --chart")
        if self.chart is not None and self.chart.suffix.lower() != ".png":
            raise UserError(f"--chart {self.chart}: a PNG is drawn; give the file that ending")
        for path in filter(None, [self.chart, self.html]):
            check_writable(path.absolute().parent)
            if path.is_dir():
                raise UserError(f"{path}: is a folder; name a file")
        choose_axis(self.over)
        self.read_references()

    def baseline_name(self) -> str | None:
        """The name of the baseline's folder, whether it was given by its name or by its path."""
        return None if self.baseline is None else RunDirectory.find(self.runs_dir, self.baseline).path.name

    def read_references(self) -> dict[str, float]:
        """Losses by their labels. Raises UserError for what is not LABEL=LOSS."""
        found = {}
        for text in self.reference:
            label, _, number = text.rpartition("=")
            try:
                loss = float(number)
            except ValueError:
                loss = 0.0
            if not label.strip() or not 0 < loss < LARGEST_LOSS:
                raise UserError(f'--reference "{text}": must be LABEL=LOSS, such as "GPT-2 small=3.500"')
            found[label.strip()] = loss
        return found
