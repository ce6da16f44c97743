"""Replicates among runs: alike in all that decides how training comes out, but for `random_seed`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from harness.model.config import ModelConfig
from harness.runs.train_config import Affects, TrainConfig, keys_affecting

SEED = "random_seed"
WITHOUT_EFFECT = keys_affecting(Affects.NOTHING)
# Where the same configuration gives other roundings, and other dropout on another number of ranks.
SURROUNDINGS = {"torch": "torch", "device": "device", "world_size": "number of ranks"}


@dataclass(frozen=True)
class RunSetup:
    """All that decides how a run comes out. The configurations are as summary.json and checkpoints have them; None is
    what was not recorded."""

    model: Mapping[str, Any]
    train: Mapping[str, Any]
    dataset: Mapping[str, Any] | None  # name and fingerprint, as in summary.json
    torch: str | None
    device: str | None  # its name
    world_size: int | None


@dataclass(frozen=True)
class Replicates:
    """`runs` has one name for each seed, in the order given; `repeated` those that trained with a seed again, which
    tells nothing more of chance."""

    runs: tuple[str, ...]
    repeated: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grouping:
    """Every run is in one group, most often alone; `notes` has a line for whatever looks like a replicate and is not
    counted as one."""

    groups: list[Replicates]
    notes: list[str] = field(default_factory=list)


def group_replicates(runs: Mapping[str, RunSetup], asked_for: str | None = None) -> Grouping:
    """Group runs, by name, that are alike but for their seed, in the order in which they are given. Of several with one
    seed the first counts, or the run `asked_for`."""
    members: dict[str, list[str]] = {}
    notes = []
    for name, setup in runs.items():
        why_alone = _why_alone(setup)
        members.setdefault(name if why_alone else _decides(setup), []).append(name)
        if why_alone:
            notes.append(f"{name}: its replicates are unknown, because {why_alone}")
    groups = [_one_per_seed(names, runs, asked_for) for names in members.values()]
    notes += [
        f"{_listed(group.repeated)}: seed of {'another' if asked_for in group.runs else 'an earlier'} run "
        "with the same settings, counted once"
        for group in groups
        if group.repeated
    ]
    return Grouping(groups, notes + _near_misses({key: names[0] for key, names in members.items()}, runs))


def _one_per_seed(names: list[str], runs: Mapping[str, RunSetup], asked_for: str | None) -> Replicates:
    first_of: dict[Any, str] = {}
    for name in sorted(names, key=lambda name: name != asked_for):
        first_of.setdefault(_with_defaults(TrainConfig, runs[name].train)[SEED], name)
    counted = {*first_of.values()}
    return Replicates(tuple(filter(counted.__contains__, names)), tuple(name for name in names if name not in counted))


def _why_alone(setup: RunSetup) -> str | None:
    missing = [name for name in ("dataset", *SURROUNDINGS) if getattr(setup, name) is None]
    if missing:
        return f"these were not recorded: {_listed(SURROUNDINGS.get(name, name) for name in missing)}"
    weights = setup.train.get("initial_weights")
    if weights is None:
        return None
    rate = setup.model.get("drop_rate")
    if not (any(rate.values()) if isinstance(rate, dict) else rate):
        return "random_seed changes nothing in it: initial_weights are given, and drop_rate is 0"
    path = PurePath(str(weights))
    if not path.is_absolute() and ".." not in path.parts:
        return f'the initial_weights "{weights}" are in its own folder, and another run\'s may differ'
    return None


def _decides(setup: RunSetup) -> str:
    return json.dumps([_settings(setup), *(getattr(setup, name) for name in SURROUNDINGS)], sort_keys=True)


def _settings(setup: RunSetup) -> list[Any]:
    """Settings of the files and the data set that decide a run; keys that another version did not write have their
    defaults."""
    train = _with_defaults(TrainConfig, setup.train)
    sequences, ranks = train.pop("global_batch_size"), setup.world_size
    if sequences is not None and ranks is not None:  # the other way of saying it
        train["gradient_accumulation_steps"] = sequences // (train["microbatch_size"] * ranks)
    train["checkpoint_interval"] = train["checkpoint_interval"] or train["validation_interval"]
    deciding = {key: value for key, value in train.items() if key not in {SEED, *WITHOUT_EFFECT}}
    return [_with_defaults(ModelConfig, setup.model), deciding, setup.dataset]


def asks_for_the_same(one: RunSetup, other: RunSetup) -> bool:
    """True if two runs are alike in what their files say, but for the seed; a number of ranks that one of them does not
    know is the other's."""
    ranks = one.world_size or other.world_size
    first, second = (
        _settings(replace(each, dataset=None, world_size=each.world_size or ranks)) for each in (one, other)
    )
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def _with_defaults(schema: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {key: each.default for key, each in schema.model_fields.items() if each.default is not PydanticUndefined}
    # Keys of earlier versions that this one has no more change nothing where they were off.
    known = {key: value for key, value in values.items() if key in schema.model_fields or value not in (None, False)}
    return {**defaults, **known}


def _near_misses(first_runs: Mapping[str, str], runs: Mapping[str, RunSetup]) -> list[str]:
    """A line for each set of groups that differ in their surroundings only."""
    alike: dict[str, list[str]] = {}
    for name in first_runs.values():
        if _why_alone(runs[name]) is None:
            alike.setdefault(json.dumps(_settings(runs[name]), sort_keys=True), []).append(name)
    notes = []
    for names in alike.values():
        if len(names) > 1:
            values = {what: [getattr(runs[name], key) for name in names] for key, what in SURROUNDINGS.items()}
            differing = [f"{what} ({', '.join(map(str, each))})" for what, each in values.items() if len({*each}) > 1]
            notes.append(f"{_listed(names)} differ in {_listed(differing)}: not counted as replicates")
    return notes


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
