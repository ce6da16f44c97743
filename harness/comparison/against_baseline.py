"""Comparison of the arms of an experiment with one of them, the baseline: choice of the loss to compare, and verdicts
as text. An arm is one run, or several runs that differ only in their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.common.errors import UserError
from harness.common.messages import abbreviated, counted
from harness.common.statistics import Inconclusive
from harness.comparison.arms import Arms, find_arms, kinds_of_chance
from harness.comparison.quantities import (
    MEASURED_TOO,
    Basis,
    Values,
    all_test_losses,
    by_basis,
    final_validation_losses,
)
from harness.comparison.records import RunRecord
from harness.comparison.verdicts import Arm, Verdict, compare_arms, seeds_sentences
from harness.runs.results import LossResult, read_window_losses


@dataclass(frozen=True)
class BaselineComparison:
    """Verdicts on all arms except the baseline. If nothing can be compared, only `title` and `notes` are given."""

    title: str  # what is compared, or why nothing can be compared
    verdicts: list[Verdict] = field(default_factory=list)
    closing: str = ""  # sentences on training noise (the spread over seeds) and on the number of seeds needed
    notes: list[str] = field(default_factory=list)
    loss: str = ""  # "test loss" or "validation loss"

    def lines(self) -> list[str]:
        """Return the comparison as text, one string per paragraph."""
        sentences = [verdict.sentence for verdict in self.verdicts]
        return [self.title, *sentences, *filter(None, [self.closing]), *self.notes]

    def as_json(self) -> dict[str, Any]:
        verdicts = [
            {**vars(each), "difference": each.difference.value if each.difference else None} for each in self.verdicts
        ]
        return {"title": self.title, "verdicts": verdicts, "seeds": self.closing, "notes": self.notes}


def compare_with(baseline: str, records: Sequence[RunRecord]) -> BaselineComparison:
    """Compare the arm of the run `baseline` with every other arm, by losses on the same text (one `Basis`). The
    `records` must include the run `baseline`.

    - Test losses are used if the baseline's arm and another arm have test losses of the same basis, otherwise the last
      validation losses.
    - Of several bases, the one with the most runs is used. The result's `notes` have the verdicts on the other bases.
    """
    arms = find_arms(records, baseline)
    own = arms.arm_with(baseline)
    if own is None:
        state = next(record.state.word for record in records if record.name == baseline)
        reason = f'its state is "{state}": only runs that were trained here to their end are compared'
    elif len(arms.run_names) == 1:
        reason = "no other arm has finished"
    else:
        compared = [record for record in records if arms.arm_of(record.name)]
        # A finished run whose loss is not finite stays part of its arm, with NaN for the loss.
        for loss, losses_of in (("test loss", all_test_losses), ("validation loss", final_validation_losses)):
            values = [losses_of(record) for record in compared]
            found = []
            for basis, measured in by_basis(values).items():
                measured_arms = {arms.arm_of(compared[row].name) for row in measured}
                if own in measured_arms and len(measured_arms) > 1:
                    found.append(_compare(own, arms, loss, basis, values, compared))
            if found:
                first, *others = found
                on_others = []
                for other in others:
                    own_notes = (note for note in other.notes if note not in first.notes)
                    said = "; ".join([*(verdict.sentence for verdict in other.verdicts), *own_notes])
                    on_others.append(f"{other.title} {said}")
                return replace(first, notes=[*on_others, *first.notes])
        reason = (
            "no other arm has a test loss on the same text and in the same precision as this arm, or a validation loss "
            "on the same text; test_loss.py measures test losses"
        )
    return BaselineComparison(f"Against {own or baseline}: inconclusive, because {reason}", notes=arms.notes)


def _compare(
    own: str, arms: Arms, loss: str, basis: Basis, values: Sequence[Values], records: Sequence[RunRecord]
) -> BaselineComparison:
    """Compare the other arms with the baseline's arm, `own`, by losses on one text (`basis`). `loss` is the name of the
    loss. `values[i]` has the losses of the run `records[i]` on all texts."""
    measured = by_basis(values)[basis]
    notes: list[str] = []
    found = {records[row].name: (records[row], each) for row, each in measured.items()}
    built, seeded = {}, []  # `seeded`: the runs of each arm whose losses give the spread over seeds
    for name, runs in arms.run_names.items():
        those = [found[run] for run in runs if run in found]
        notes += [
            f"{record.name}: {loss} {each.remark}"
            for record, each in those
            if each.remark and MEASURED_TOO not in each.remark
        ]
        losses = [each.value for _, each in those]
        results = [each.result for _, each in those if isinstance(each.result, LossResult)]
        windows: list[np.ndarray] | None = None
        if results:  # of test losses; other losses have none
            try:
                folders = (record.directory for record, _ in those)
                windows = [*map(read_window_losses, folders, results)]
            except UserError as error:
                notes.append(str(error))
        built[name] = Arm(name, losses, windows, [record.name for record, _ in those], arms.diverged.get(name, ()))
        seeded += [] if built[name].flaw else [[record for record, _ in those]]
    baseline = built[own]
    verdicts = compare_arms(baseline, [arm for name, arm in built.items() if name != own])
    left_out: dict[str, list[str]] = {}
    for row, (record, of_run) in enumerate(zip(records, values, strict=True)):
        if row not in measured:
            if isinstance(of_run, Inconclusive):
                reason = of_run.reason
            else:
                reason = f"measured on {' and '.join(each.basis.words for each in of_run)}"
            left_out.setdefault(reason, []).append(record.name)
    notes += [f"{abbreviated(names)}: not compared by {loss}: {reason}" for reason, names in left_out.items()]
    title = f"Against {own} ({counted(baseline.run_count, 'run')}), by {loss} on {basis.words}:"
    closing = seeds_sentences(verdicts, [*built.values()], kinds_of_chance(seeded))
    return BaselineComparison(title, verdicts, closing, notes + arms.notes, loss)
