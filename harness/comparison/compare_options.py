"""compare_runs.py's options: what is asked for, and which of them mean nothing together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.common.errors import UserError
from harness.common.files import check_writable
from harness.common.messages import abbreviated
from harness.comparison.curves import choose_axis
from harness.comparison.records import RunRecord, read_records
from harness.comparison.replicated_arms import arm_of_name, named_arms
from harness.runs.directory import RunDirectory

LARGEST_LOSS = 1000.0


@dataclass(frozen=True)
class CompareOptions:
    """Options of compare_runs.py, under their own names."""

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
        """Raise UserError for options that mean nothing together, or without the runs they need."""
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

    def choose_runs(self, runs: tuple[str, ...]) -> ChosenRuns:
        """Read what is to be compared. The baseline may be a run, an arm by its name in the verdicts, or a pattern.

        Raises UserError for names that are not there, and for a pattern of several arms' runs.
        """
        if self.baseline is None:
            return ChosenRuns.of(self, read_records(self.runs_dir, runs), are_named=bool(runs))
        named = self._baseline_runs(runs, self.baseline)
        records = read_records(self.runs_dir, (*runs, *named) if runs else ())
        asked = replace(self, baseline=_one_of_their_arm(records, named, self.baseline))
        return ChosenRuns.of(asked, records, are_named=bool(runs))

    def _baseline_runs(self, runs: tuple[str, ...], baseline: str) -> Sequence[str]:
        """The names of the runs that the baseline names, in the first place as a run or a pattern."""
        try:
            return [run.path.name for run in RunDirectory.find_all(self.runs_dir, baseline)]
        except UserError:
            for among in dict.fromkeys((runs, ())):  # those of other runs, if the arm is in none of these
                found = arm_of_name(read_records(self.runs_dir, among), baseline)
                if found:
                    return found
            raise

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


@dataclass(frozen=True)
class ChosenRuns:
    """The runs to compare: `asked` names one of the baseline's runs, if there is a baseline. `left_out` are
    never-trained runs, not asked for by name, of a folder in which others have been trained."""

    asked: CompareOptions
    records: list[RunRecord]
    left_out: list[RunRecord]

    @classmethod
    def of(cls, asked: CompareOptions, records: list[RunRecord], *, are_named: bool) -> ChosenRuns:
        shown = [record for record in records if record.state.word != "never trained"]
        if are_named or not shown:
            return cls(asked, records, [])
        kept = [record for record in records if record in shown or record.name == asked.baseline]
        return cls(asked, kept, [record for record in records if record not in kept])


def _one_of_their_arm(records: Sequence[RunRecord], named: Sequence[str], baseline: str) -> str:
    """A run of the arm that the named ones are in, as far as they have finished. Raises UserError for several arms."""
    if len(named) == 1:
        return named[0]
    arms = named_arms(records)
    leads = {arm: name for name in reversed(named) if (arm := arms.arm_of(name)) is not None}
    if len(leads) > 1:
        raise UserError(f"--baseline {baseline}: runs of several arms: {abbreviated(sorted(leads))}; name one of them")
    return next(iter(leads.values()), named[0])
