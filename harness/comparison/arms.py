"""Arms of an experiment. An arm is a finished run, or several finished runs (replicates) that differ only in their
seeds and in settings that do not affect the result."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from harness.common.messages import abbreviated
from harness.common.statistics import Inconclusive
from harness.comparison.quantities import UNKNOWN
from harness.comparison.records import RunRecord
from harness.model.config import ModelConfig
from harness.runs.budget import as_tokens
from harness.runs.train_config import Affects, TrainConfig, keys_affecting

SEED = "random_seed"
# What each seed of train.json decides; random_seed decides those whose own seed is not given.
SEEDS = {"init_seed": "the initial weights", "data_seed": "the order of the data", "dropout_seed": "dropout"}
SEED_ENDING = re.compile(r"[-_.]?(?:(?:random|init|data|dropout)[-_]?)?seed[-_=.]?\d+$")
WITHOUT_EFFECT = keys_affecting(Affects.NOTHING)
# Facts that must be equal for replicates, besides the settings. The same configuration gives other rounding errors with
# another version of torch, device or number of ranks. The number of ranks also changes the dropout masks.
SURROUNDINGS = {"torch": "torch", "device": "device", "world_size": "number of ranks"}
# The precision must be equal, too, but `_by_precision` compares it, because summaries of earlier versions do not record
# which precision "auto" stood for.


@dataclass(frozen=True)
class Arms:
    """Arms of an experiment, by name."""

    run_names: dict[str, tuple[str, ...]]  # names of each arm's finished runs, by the name of the arm
    notes: list[str] = field(default_factory=list)
    diverged: dict[str, tuple[str, ...]] = field(default_factory=dict)  # diverged runs of each arm, finished or not

    def arm_of(self, run: str) -> str | None:
        """Return the name of the arm that has `run` among its finished runs, or None if no arm does."""
        return next((arm for arm, names in self.run_names.items() if run in names), None)

    def members(self, arm: str) -> tuple[str, ...]:
        """Return the names of all runs of an arm, diverged or not."""
        return tuple(dict.fromkeys((*self.run_names.get(arm, ()), *self.diverged.get(arm, ()))))

    def arm_with(self, run: str) -> str | None:
        """Return the name of the arm that has `run` among its `members`, or None if no arm does."""
        return next((arm for arm in self.run_names if run in self.members(arm)), None)


def find_arms(records: Sequence[RunRecord], baseline: str | None = None) -> Arms:
    """Divide the finished runs into arms. A run whose replicates cannot be recognized is an arm of its own. Of an arm's
    runs with the same seeds, one is kept: the run `baseline`, or else the first."""
    unfinished: dict[str, list[str]] = {}
    by_settings: dict[tuple[str, ...], list[RunRecord]] = {}  # by the run's name if its settings are not known
    unknown, repeated, arms = [], [], []
    for record in records:
        if record.state.word != "finished":
            unfinished.setdefault(record.state.word, []).append(record.name)
            continue
        settings = settings_of(record)
        if isinstance(settings, Inconclusive):
            unknown.append(f"{record.name}: an arm of its own; its replicates are unknown, because {settings.reason}")
        by_settings.setdefault((record.name,) if isinstance(settings, Inconclusive) else settings, []).append(record)
    first_runs: dict[str, list[RunRecord]] = {}  # each arm's first run, by the first text of `settings_of`
    parts = [(key[0], part) for key, members in by_settings.items() for part in _by_precision(members)]
    for shared, members in sorted(parts, key=lambda part: records.index(part[1][0])):
        by_seed: dict[str, str] = {}
        for record in sorted(members, key=lambda record: record.name != baseline):
            by_seed.setdefault(json.dumps(seeds_of(record)), record.name)
        counted = [record for record in members if record.name in by_seed.values()]
        arms.append(tuple(record.name for record in counted))
        if again := [record.name for record in members if record.name not in by_seed.values()]:
            repeated.append(f"{abbreviated(again)}: not counted, because another run has the same seed and settings")
        first_runs.setdefault(shared, []).append(counted[0])
    named = _named(arms, {record.name for record in records}, baseline)
    diverged = _diverged(records, named)
    unfinished["diverged"] = [name for name in unfinished.get("diverged", ()) if name not in sum(diverged.values(), ())]
    notes = [f"{abbreviated(names)}: diverged, so {arm} is not called better" for arm, names in diverged.items()]
    notes += [f"{abbreviated(names)}: {word}, and so in no comparison" for word, names in unfinished.items() if names]
    notes += unknown + repeated
    for firsts in (firsts for firsts in first_runs.values() if len(firsts) > 1):
        differing = []
        for key, what in {**SURROUNDINGS, "precision": "precision", "attention": "attention"}.items():
            missing = "auto" if key == "attention" else UNKNOWN  # no kernel is recorded if torch chose it
            values = [record.recorded(key) or missing for record in firsts]
            if len({*values} - {UNKNOWN}) > 1:
                differing.append(f"{what} ({', '.join(map(str, values))})")
        together = ", ".join(record.name for record in firsts)
        notes.append(f"{together} differ in {' and '.join(differing)}: not counted as replicates")
    return Arms(named, notes, diverged)


def _diverged(records: Sequence[RunRecord], arms: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the names of each arm's diverged runs, by the name of the arm. A diverged run that is unfinished is
    included if it differs from the arm's runs only in its seeds."""
    by_name = {record.name: record for record in records}
    found: dict[str, tuple[str, ...]] = {}
    for arm, names in arms.items():
        if at_end := [name for name in names if (summary := by_name[name].summary) and summary.has_diverged]:
            found[arm] = tuple(at_end)
    for record in records:
        if record.state.word != "diverged" or record.meta is None:
            continue
        lost = replace(record, train=record.meta.train or record.train)  # train.json may have been edited since
        settings = settings_of(lost, at_end=False)
        for arm, runs in arms.items():
            others = [by_name[name] for name in runs]
            is_alike = isinstance(settings, tuple) and settings == settings_of(others[0], at_end=False)
            precisions = {each.recorded("precision") for each in (lost, *others)} - {None}
            if is_alike and len(precisions) < 2 and seeds_of(lost) not in map(seeds_of, others):
                found[arm] = (*found.get(arm, ()), record.name)
    return found


def seeds_of(record: RunRecord) -> dict[str, Any]:
    """Return the run's seeds by the keys of SEEDS, with None for each seed that it has not used."""
    train, rate = record.train, record.model.get("drop_rate")
    drops = any(rate.values()) if isinstance(rate, dict) else rate
    uses = {"init_seed": not train.get("initial_weights"), "data_seed": train.get("shuffle"), "dropout_seed": drops}
    common = train.get(SEED, TrainConfig.model_fields[SEED].default)
    own = {key: common if train.get(key) is None else train[key] for key in SEEDS}
    return {key: seed if uses[key] else None for key, seed in own.items()}


def kinds_of_chance(arms: Sequence[Sequence[RunRecord]]) -> tuple[str, ...]:
    """Return the values of SEEDS, such as "dropout", for the seeds that differ between the runs of at least one arm."""
    seeds = [[{key: json.dumps(seed) for key, seed in seeds_of(record).items()} for record in arm] for arm in arms]
    return tuple(what for key, what in SEEDS.items() if any(len({each[key] for each in arm}) > 1 for arm in seeds))


def _by_precision(members: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Split the runs by the precision that they were trained in, if several precisions are recorded."""
    found: dict[str | None, list[RunRecord]] = {}
    for record in members:
        found.setdefault(record.recorded("precision"), []).append(record)
    return list(found.values()) if len(found.keys() - {None}) > 1 else [[*members]]


def _named(arms: Sequence[tuple[str, ...]], taken: set[str], baseline: str | None) -> dict[str, tuple[str, ...]]:
    """Return the names of each arm's runs, by the name of the arm. `taken` has the names of all runs.

    - The runs `wide-seed1` and `wide-seed2` are the arm `wide` if this name is free.
    - Any other arm has the name of one of its runs: `baseline` if that is among them, or else the first.
    """
    stems = []
    for arm in arms:
        shared = {SEED_ENDING.sub("", name) for name in arm}
        stems.append(next(iter(shared)) if len(arm) > 1 and len(shared) == 1 else "")
    named = {}
    for arm, stem in zip(arms, stems, strict=True):
        is_free = stem and stem not in taken and stems.count(stem) == 1
        named[stem if is_free else baseline if baseline in arm else arm[0]] = arm
    return named


def settings_of(record: RunRecord, *, at_end: bool = True) -> tuple[str, str] | Inconclusive:
    """Return two JSON texts. Runs that differ only in their seeds (replicates) have the same two.

    - The first has the dataset, the settings that affect the result, the changes made during training and, if `at_end`
      is true, the tokens seen.
    - The second has the SURROUNDINGS and the attention kernel.

    The run must have finished if `at_end` is true. Returns Inconclusive if its replicates cannot be recognized.
    """
    dataset, model = record.dataset or None, record.model
    known = {"dataset": dataset, **{key: record.recorded(key) for key in SURROUNDINGS}}
    missing = [SURROUNDINGS.get(key, key) for key, value in known.items() if value is None]
    if missing:
        return Inconclusive(f"these were not recorded: {', '.join(missing)}")
    train = _with_defaults(TrainConfig, as_tokens(record.train, record.recorded("budget")))
    if (weights := train["initial_weights"]) is not None:
        if all(seed is None for seed in seeds_of(record).values()):
            return Inconclusive(
                "random_seed changes nothing in it: initial_weights are given, drop_rate is 0 and shuffle is false"
            )
        # A relative path is relative to the run's folder: runs with equal paths may have different files.
        try:
            train["initial_weights"] = os.path.realpath(record.directory.path / str(weights))
        except ValueError:  # a NUL or half of a surrogate pair, in an edited file
            return Inconclusive("its initial_weights are not a path")
    sequences = train.pop("global_batch_size")
    if sequences is not None:  # another way to give gradient_accumulation_steps
        microbatch = train.get("microbatch_size")
        if not isinstance(microbatch, int) or microbatch < 1:
            return Inconclusive("its microbatch_size was not recorded")
        train["gradient_accumulation_steps"] = sequences // (microbatch * known["world_size"])
    batches, microbatch = train.pop("validation_batches"), train.get("microbatch_size")
    if isinstance(batches, int) and isinstance(microbatch, int):  # another way to give validation_sequences
        train["validation_sequences"] = batches * microbatch
    # One rank exchanges no gradients. A sum of two has the same bits in any order, but compiled code is cut at buckets.
    is_compiled = train["compile"] is True or (train["compile"] == "auto" and not known["device"].endswith("CPU"))
    if known["world_size"] < (2 if is_compiled else 3):
        del train["bucket_mb"]
    if train["min_train_tokens"] == -1 and at_end:
        train["min_train_tokens"] = record.tokens_seen
    train["checkpoint_interval"] = train["checkpoint_interval"] or train["validation_interval"]
    deciding = {key: value for key, value in train.items() if key not in {SEED, *SEEDS, *WITHOUT_EFFECT}}
    # A run whose budget was lowered while it was trained may have seen more tokens than the budget.
    deciding["tokens_seen"] = record.recorded("tokens_seen") if at_end else None
    settings = [_with_defaults(ModelConfig, model), deciding, dataset, record.changes]
    surroundings = [*(known[key] for key in SURROUNDINGS), record.recorded("attention")]
    return json.dumps(settings, sort_keys=True), json.dumps(surroundings)


def _with_defaults(schema: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration `values`, with the defaults of `schema` for missing keys. Keys that are not in `schema`
    are left out if their value is None, False or 0."""
    defaults = {key: each.default for key, each in schema.model_fields.items() if each.default is not PydanticUndefined}
    # The feature of an unknown key with one of these values was off.
    known = {key: value for key, value in values.items() if key in schema.model_fields or value not in (None, False)}
    return {**defaults, **known}
