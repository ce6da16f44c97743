"""Runs as arms of an experiment: those that have finished, replicates together under one name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from harness.analysis.records import RunRecord
from harness.analysis.replicates import RunSetup, group_replicates
from harness.common.messages import abbreviated
from harness.runs.budget import as_tokens

# What is left of names such as base-seed-1 and base-seed-2 where they begin to differ.
SEED_ENDING = re.compile(r"[-_.]?((random[-_]?)?seed[-_=.]?\d*)?[-_=.]*$")


@dataclass(frozen=True)
class NamedArms:
    """Names of runs by the name of their arm, and remarks on runs that are in none or not where one might think."""

    runs: dict[str, tuple[str, ...]]
    notes: list[str] = field(default_factory=list)

    def arm_of(self, run: str) -> str | None:
        """The name of the arm that the run is in."""
        return next((arm for arm, runs in self.runs.items() if run in runs), None)


def named_arms(records: Sequence[RunRecord]) -> NamedArms:
    """An arm for each group of replicates among the runs that have finished, in their order."""
    finished = {record.name: setup_of(record) for record in records if record.summary is not None}
    grouping = group_replicates(finished)
    taken: dict[str, tuple[str, ...]] = {}
    for group in grouping.groups:
        name = arm_name(group.runs)
        taken[f"{group.runs[0]} and others" if name in taken else name] = group.runs
    unfinished: dict[str, list[str]] = {}
    for record in records:
        if record.summary is None:
            unfinished.setdefault(record.state.word, []).append(record.name)
    left_out = [f"{word}, and so in no comparison: {abbreviated(names)}" for word, names in unfinished.items()]
    return NamedArms(taken, [*left_out, *grouping.notes])


def setup_of(record: RunRecord) -> RunSetup:
    """What decides how the run came out."""
    dataset: Mapping[str, object] | None = record.dataset or None
    train = as_tokens(record.train, record.summary.budget if record.summary else None)
    return RunSetup(record.model, train, dataset, record.torch, record.device, record.world_size)


def arm_name(runs: Sequence[str]) -> str:
    """A single run's name; of several what they begin with, without what is left of the word seed."""
    if len(runs) == 1:
        return runs[0]
    alike = [letters[0] for letters in takewhile(lambda each: len({*each}) == 1, zip(*runs, strict=False))]
    return SEED_ENDING.sub("", "".join(alike)) or f"{runs[0]} and others"
