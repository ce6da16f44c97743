"""Runs as arms of an experiment: those that have finished, replicates together under one name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, takewhile

from harness.common.messages import abbreviated
from harness.comparison.records import RunRecord
from harness.comparison.replicates import RunSetup, asks_for_the_same, group_replicates
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


def named_arms(records: Sequence[RunRecord], baseline: str | None = None) -> NamedArms:
    """An arm for each group of replicates among the runs that have finished, in their order, each by a name of its own,
    which is no other run's. That of the run `baseline` is named so that this run is recognised in it, and has it even
    if its seed was trained before."""
    finished = {record.name: setup_of(record) for record in records if record.summary is not None}
    grouping = group_replicates(finished, baseline)
    groups = [group.runs for group in grouping.groups]
    names = _names_of(groups, {record.name for record in records}, baseline)
    unfinished: dict[str, list[str]] = {}
    for record in records:
        if record.summary is None:
            unfinished.setdefault(record.state.word, []).append(record.name)
    left_out = [f"{word}, and so in no comparison: {abbreviated(names)}" for word, names in unfinished.items()]
    return NamedArms(dict(zip(names, groups, strict=True)), [*left_out, *grouping.notes])


def _names_of(groups: Sequence[Sequence[str]], runs: set[str], baseline: str | None) -> list[str]:
    """The groups' names, in their order. `runs` are the names of all runs, those in no group included."""
    beginnings = Counter(_beginning(group) for group in groups if len(group) > 1)
    names: list[str] = []
    for group in groups:
        if len(group) == 1:
            names.append(group[0])
            continue
        lead, may_be = (baseline, {baseline}) if baseline in group else (min(group), {*group})
        unusable = (runs - may_be).union(names)
        name = _beginning(group)
        if not name or beginnings[name] > 1 or name in unusable:
            name = f"{lead} and others"
        numbered = (f"{name} ({number})" for number in count(2))
        names.append(next(each for each in chain([name], numbered) if each not in unusable))
    return names


def has_unfinished_arm(records: Sequence[RunRecord], finished: str) -> bool:
    """True if an unfinished run is of another arm than the run `finished`, by what their files ask for: what else
    decides, such as the machine, is not known before the end."""
    own = next(record for record in records if record.name == finished)
    others = (record for record in records if record.summary is None and record.model and record.train)
    return any(not asks_for_the_same(_asked_of(own), _asked_of(other)) for other in others)


def _asked_of(record: RunRecord) -> RunSetup:
    """Setup from the run's files alone, with its budget as it is given."""
    return RunSetup(record.model, record.train, None, None, None, record.world_size)


def arm_of_name(records: Sequence[RunRecord], name: str) -> tuple[str, ...]:
    """The runs of the arm that a comparison of these runs calls by that name, first the one that it may be called
    after; none if there is no such arm."""
    # A baseline's arm may be called after the run that was asked for.
    leads = [record.name for record in records if record.summary is not None and name.startswith(record.name)]
    for lead in (None, *leads):
        found = named_arms(records, lead).runs.get(name)
        if found:
            return tuple(sorted(found, key=lambda run: run != lead))
    return ()


def setup_of(record: RunRecord) -> RunSetup:
    """Setup that decides how the run came out, with its budget in tokens."""
    dataset: Mapping[str, object] | None = record.dataset or None
    train = as_tokens(record.train, record.summary.budget if record.summary else None)
    return RunSetup(record.model, train, dataset, record.torch, record.device, record.world_size)


def _beginning(runs: Sequence[str]) -> str:
    """Common beginning of the names, in whole words and numbers, without a rest of the word seed."""
    alike = "".join(letters[0] for letters in takewhile(lambda each: len({*each}) == 1, zip(*runs, strict=False)))
    for kind in (r"[^\W\d_]", r"\d"):
        if any(re.match(kind, run[len(alike) :]) for run in runs):
            alike = re.sub(f"{kind}+$", "", alike)
    return SEED_ENDING.sub("", alike)
