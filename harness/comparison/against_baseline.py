"""Every arm of an experiment against one baseline: which loss is compared, and the verdicts in lines for a reader."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from harness.common.errors import UserError
from harness.common.messages import abbreviated
from harness.comparison.arms import Arm
from harness.comparison.comparability import (
    MEASURED_TOO,
    Ground,
    Group,
    Measured,
    Missing,
    chosen_results,
    comparable_groups,
    loss_ground,
)
from harness.comparison.quantities import final_validation_losses
from harness.comparison.records import RunRecord
from harness.comparison.replicated_arms import NamedArms, has_unfinished_arm, named_arms
from harness.comparison.result_quantities import all_test_losses, test_losses
from harness.comparison.verdicts import Verdict, compare_arms, seeds_for_seen, seeds_sentence
from harness.runs.results import LossResult, read_window_losses


@dataclass(frozen=True)
class BaselineComparison:
    """Verdicts against one baseline: `title` says what is compared, `notes` what was left out, `loss` which loss the
    verdicts use. `verdicts` is empty if nothing compares."""

    title: str
    verdicts: list[Verdict] = field(default_factory=list)
    closing: str = ""
    notes: list[str] = field(default_factory=list)
    loss: str = ""

    def lines(self) -> list[str]:
        """Paragraphs for a reader, one string each."""
        sentences = [verdict.sentence for verdict in self.verdicts]
        return [self.title, *sentences, *filter(None, [self.closing]), *self.notes]


def compare_with(baseline: str, records: Sequence[RunRecord]) -> BaselineComparison:
    """Compare all arms of the runs with that of the run `baseline`, which is one of them, by the test loss on the text
    that most of them were measured on, else by the last validation loss."""
    arms = named_arms(records, baseline)
    own = arms.arm_of(baseline)
    if own is None:
        state = next(record.state.word for record in records if record.name == baseline)
        verb = "was" if state == "never trained" else "is"
        return _nothing(baseline, f"it {verb} {state}: only what has been trained here to its end is compared", arms)
    if len(arms.runs) == 1 and has_unfinished_arm(records, baseline):
        return _nothing(own, "no run of another arm has finished", arms)
    names = [record.name for record in records]
    for loss, measured in (("test loss", _test_losses(records)), ("validation loss", final_validation_losses(records))):
        groups = [
            group for group in comparable_groups(measured) if any(names[row] in arms.runs[own] for row in group.members)
        ]
        if groups and len(groups[0].members) > 1:
            return _compare(own, arms, _Loss(loss, groups[0], records, measured))
    return _nothing(baseline, "no other run has a test loss or validation loss on the same text", arms)


def _test_losses(records: Sequence[RunRecord]) -> list[Measured]:
    """Test losses by run; a diverged run stays part of its arm, with NaN for a loss that is not finite."""
    found = zip(records, test_losses(records), strict=True)
    return [all_test_losses(record) or in_table for record, in_table in found]


def _nothing(baseline: str, reason: str, arms: NamedArms) -> BaselineComparison:
    return BaselineComparison(f"Against {baseline}: inconclusive, because {reason}", notes=arms.notes)


@dataclass(frozen=True)
class _Loss:
    """The loss to compare: `group` has the losses by the position of their runs, `measured` those on other texts, too.
    A loss that is not finite is NaN."""

    name: str
    group: Group
    records: Sequence[RunRecord]
    measured: Sequence[Measured]

    def arm(self, name: str, runs: Sequence[str], notes: list[str]) -> Arm:
        """Build the arm of these runs, with window losses if every run has them; append remarks to `notes`."""
        found = {self.records[row].name: (row, each) for row, each in self.group.members.items()}
        members = [found[run] for run in runs if run in found]
        losses = [measurement.value for _, measurement in members]
        notes += [
            f"{self.records[row].name}: {self.name} {measurement.remark}"
            for row, measurement in members
            if measurement.remark and MEASURED_TOO not in measurement.remark
        ]
        its_records = [self.records[row] for row, _ in members]
        windows = self._windows(its_records, notes) if np.isfinite(losses).all() else None
        return Arm(name, losses, windows, [record.name for record in its_records])

    def left_out(self, runs: Collection[str]) -> list[str]:
        """Lines that name those of `runs` without this loss on this text, with the reason."""
        names: dict[str, list[str]] = {}
        for row, (record, measured) in enumerate(zip(self.records, self.measured, strict=True)):
            if record.name in runs and row not in self.group.members:
                names.setdefault(_elsewhere(measured, self.group.ground), []).append(record.name)
        return [f"{abbreviated(each)}: not compared by {self.name}: {reason}" for reason, each in names.items()]

    def _windows(self, records: Sequence[RunRecord], notes: list[str]) -> list[np.ndarray] | None:
        try:
            windows = [window_losses(record, self.group.ground) for record in records]
        except UserError as error:
            notes.append(str(error))
            return None
        there = [each for each in windows if each is not None]
        return there if len(there) == len(windows) and there else None


def _elsewhere(measured: Measured, ground: Ground) -> str:
    if isinstance(measured, Missing):
        return measured.reason
    return f"measured on {' and '.join(each.ground.words_beside([ground]) for each in measured)}"


def window_losses(record: RunRecord, ground: Ground) -> np.ndarray | None:
    """The loss of each window of the text, [windows], of the checkpoint that the table shows; None if the ground is not
    that of a test loss. Raises UserError if its file cannot be read."""
    results = record.results.of(LossResult)
    chosen = chosen_results(record, results, [loss_ground(result) for result in results])
    result = next((result for result, its_ground, _ in chosen if its_ground == ground), None)
    return None if result is None else read_window_losses(record.directory, result)


def _compare(own: str, arms: NamedArms, loss: _Loss) -> BaselineComparison:
    notes: list[str] = []
    built = {name: loss.arm(name, runs, notes) for name, runs in arms.runs.items()}
    others = [arm for name, arm in built.items() if name != own]
    runs = built[own].runs
    title = f"Against {own} ({runs} {'run' if runs == 1 else 'runs'}), by {loss.name} on {loss.group.ground.words}:"
    if not others:
        return _nothing(own, "there is no other arm", arms)
    verdicts = compare_arms(built[own], others)
    closing = [seeds_sentence([built[own], *others]), seeds_for_seen(verdicts, [built[own], *others])]
    notes += [*loss.left_out({*chain(*arms.runs.values())}), *arms.notes]
    return BaselineComparison(title, verdicts, " ".join(filter(None, closing)), notes, loss.name)
