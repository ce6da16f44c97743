"""A SWEEP.json: which runs to derive from a base, what they are called, and what the file must look like."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from harness.common.json_files import SCHEMA_KEY, parse_config, read_json_object
from harness.common.messages import quoted
from harness.sweeps.derived_runs import MODEL_KEYS, TRAIN_KEYS, check_key
from harness.sweeps.space import NOT_SEARCHED, count_points, known_keys, parse_domain, parse_part

LARGEST_POINTS = 1000  # beyond it a sweep is a typing error, or wants another program
LONGEST_LABEL = 60  # characters of a run's name that say what differs
RUN_NAME_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
# What runs' names call the keys that are varied most; others are written out.
SHORT = {
    "learning_rate": "lr",
    "random_seed": "seed",
    "weight_decay": "wd",
    "emb_dim": "emb",
    "n_layers": "layers",
    "n_heads": "heads",
    "context_length": "context",
    "drop_rate": "dropout",
    "microbatch_size": "micro",
    "global_batch_size": "batch",
    "gradient_accumulation_steps": "accumulation",
    "batch_ramp": "ramp",
    "min_train_tokens": "tokens",
    "train_steps": "steps",
    "target_flops": "flops",
    "scale_with_batch": "batch_scale",
    "scale_with_depth": "depth_scale",
    "warmup_steps": "warmup",
    "warmup_period_percent": "warmup_percent",
    "clipping_max_norm": "clip",
    "lr_schedule": "schedule",
}

ENTRY_NAME = "name"  # of an entry of `together`: no setting, but what its runs are called
Settings = dict[str, JsonValue]
SEARCH_KEYS = {"search", "trials", "objective", "pruning", "sampler_seed"}
NUMBER_SCHEMA = {"type": "number"}
RANGE_SCHEMA = {
    "type": "object",
    "properties": {"min": NUMBER_SCHEMA, "max": NUMBER_SCHEMA, "log": {"type": "boolean"}, "step": NUMBER_SCHEMA},
    "required": ["min", "max"],
    "additionalProperties": False,
}


class Pruning(BaseModel):
    """Condition for pruning a trial of a search: its lowest validation loss so far is above the median that the
    finished trials had after as many tokens."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    after_trials: int = Field(default=5, ge=1, le=LARGEST_POINTS, description="Not before so many are finished.")
    after_share: float = Field(default=0.3, ge=0, le=1, description="Not before this share of a trial's tokens.")


class Sweep(BaseModel):
    """A SWEEP.json: every combination of `vary`'s values and `together`'s entries is a run; or, with `search`, each of
    `trials` runs is chosen by the results of the earlier ones."""

    model_config = ConfigDict(title="SWEEP.json", frozen=True, strict=True, extra="forbid")

    base: str = Field(min_length=1, description="The run to derive from: a folder beside those that are made.")
    name: str | None = Field(default=None, description="What the runs' names begin with; null: the file's name.")
    set: Settings = Field(
        default={}, description="Keys of model.json and train.json, alike in all runs but where an entry changes them."
    )
    vary: dict[str, list[JsonValue]] = Field(default={}, description="Values to combine with all the others.")
    together: list[Settings] = Field(default=[], description="Keys that change together: each entry is one value.")
    search: dict[str, Any] = Field(
        default={}, description='Ranges ({"min": ..., "max": ..., "log": true}) or lists of values to choose from.'
    )
    trials: int | None = Field(default=None, ge=1, le=LARGEST_POINTS, description="How many runs a search makes.")
    objective: Literal["final_validation_loss", "best_validation_loss"] = Field(
        default="final_validation_loss", description="What a search minimizes."
    )
    pruning: Pruning = Field(default=Pruning(), description="When a search may end a trial early.")
    sampler_seed: int = Field(default=0, ge=0, lt=2**63, description="Of the search's random choices.")

    @model_validator(mode="before")
    @classmethod
    def _explain_settings(cls, raw: Any) -> Any:
        """A setting beside "vary" was meant to be in it. "$schema" is for editors."""
        if not isinstance(raw, dict):
            return raw
        for key in raw:
            if key not in cls.model_fields and (key in MODEL_KEYS or key in TRAIN_KEYS):
                raise ValueError(
                    f'key "{key}": belongs in "set" (one value for all runs) or in "vary" (a list of them)'
                )
        return {key: value for key, value in raw.items() if key != SCHEMA_KEY}

    @field_validator("pruning", mode="before")
    @classmethod
    def _pruning(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise ValueError(f'key "pruning": must be an object, such as {{"after_trials": 5}}, not {quoted(raw)}')
        try:
            return parse_part(Pruning, raw)
        except ValueError as error:
            raise ValueError(f'in "pruning": {error}') from None

    @field_validator("search", mode="after")
    @classmethod
    def _domains(cls, raw: dict[str, Any]) -> dict[str, Any]:
        try:
            return {key: parse_domain(key, each) for key, each in raw.items()}
        except ValueError as error:
            raise ValueError(f'in "search": {error}') from None

    @model_validator(mode="after")
    def _possible(self) -> Sweep:
        for place, key in self._all_keys():
            try:
                check_key(key)
            except ValueError as error:
                raise ValueError(f'in "{place}": {error}') from None
        if self.is_search:
            self._check_search()
            return self
        self._check_values()
        self._check_places()
        self._check_names()
        if self.count > LARGEST_POINTS:
            raise ValueError(
                f'keys "vary" and "together": make {self.count:,} runs; a sweep can have {LARGEST_POINTS:,}'
            )
        return self

    def _check_values(self) -> None:
        if not self.vary and not self.together:
            raise ValueError('keys "vary" and "together": give at least one of them; derive_run.py makes a single run')
        for key, values in self.vary.items():
            if not values:
                raise ValueError(f'key "vary.{key}": has no values; give at least one, or remove the key')

    def _check_places(self) -> None:
        """A key has one place; but what `set` gives to all runs, entries of `together` may change, if not all do."""
        varied = Counter(key for _, key in self._varied())
        everywhere = [key for key in self.set if self.together and all(key in entry for entry in self.together)]
        twice = [key for key, count in varied.items() if count > 1]
        twice += [key for key in self.set if key in self.vary] + everywhere
        if twice:
            raise ValueError(f'key "{twice[0]}": given in two of "set", "vary" and "together"; keep one')

    def _check_names(self) -> None:
        names = [entry[ENTRY_NAME] for entry in self.together if ENTRY_NAME in entry]
        for name in names:
            if not isinstance(name, str) or not RUN_NAME_PART.fullmatch(name) or len(name) > LONGEST_LABEL:
                raise ValueError(
                    f'in "together": key "name": {quoted(name)} must be a text of letters, digits and _ . + - that '
                    f"begins with a letter or digit, of {LONGEST_LABEL} characters at most"
                )
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(f'in "together": key "name": {quoted(twice[0])} is given twice; give each its own')

    @property
    def is_search(self) -> bool:
        return bool(SEARCH_KEYS & self.model_fields_set)

    def _check_search(self) -> None:
        if not self.search:
            raise ValueError('key "search": name at least one key of model.json or train.json to choose values for')
        for key in ("vary", "together"):
            if getattr(self, key):
                raise ValueError(
                    f'keys "search" and "{key}": leave one of them out; a search chooses every value itself'
                )
        if self.trials is None:
            raise ValueError('key "trials": missing; give the number of runs that the search makes')
        twice = [key for key in self.search if key in self.set]
        if twice:
            raise ValueError(f'key "{twice[0]}": given in "set" and in "search"; keep one')
        points = count_points(self.search)
        if points is not None and points < self.trials:
            raise ValueError(
                f'key "trials": {self.trials:,}, but "search" has {points:,} points; "vary" makes them all'
            )

    def _all_keys(self) -> Iterator[tuple[str, str]]:
        yield from (("set", key) for key in self.set)
        yield from self._varied()

    def _varied(self) -> Iterator[tuple[str, str]]:
        """(place, key) of what may differ between the runs, each once, in the order of the file."""
        together = (key for entry in self.together for key in entry if key != ENTRY_NAME)
        yield from (("together", key) for key in dict.fromkeys(together))
        yield from (("vary", key) for key in self.vary)

    @property
    def count(self) -> int:
        """Number of runs it makes."""
        return math.prod(len(values) for values in self.vary.values()) * max(1, len(self.together))

    def points(self) -> Iterator[Settings]:
        """Settings in which each run differs from the base and from `set`, in the order of the file, the last key
        fastest."""
        yield from ({key: each[key] for key in each if key != ENTRY_NAME} for each in self._combinations())

    def names(self) -> list[str]:
        """Suffixes of the runs' names, one for each point: an entry's own name stands for all that the entry sets."""
        points = []
        for each in self._combinations():
            own = {key: each[key] for key in (ENTRY_NAME, *self.vary) if key in each}
            points.append(own if ENTRY_NAME in each else each)
        return labels(points)

    def _combinations(self) -> Iterator[Settings]:
        for entry in self.together or [{}]:
            for values in itertools.product(*self.vary.values()):
                yield {**entry, **dict(zip(self.vary, values, strict=True))}

    def describe_equal(self, one: int, other: int) -> str:
        """The two values, or entries, by which two of its points differ (given by their positions), if that makes no
        difference to the runs; the first of them, should there be several."""
        axes = [range(max(1, len(self.together))), *(range(len(values)) for values in self.vary.values())]
        places = list(itertools.product(*axes))
        (first, second), *others = zip(places[one], places[other], strict=True)
        if first != second:
            return f'key "together": entries {first + 1} and {second + 1}'
        pairs = zip(self.vary.items(), others, strict=True)
        key, values = next((key, [values[at] for at in pair]) for (key, values), pair in pairs if pair[0] != pair[1])
        return f'key "vary.{key}": {quoted(values[0])} and {quoted(values[1])}'


def labels(points: list[Settings]) -> list[str]:
    """A name for each point, of what may differ: short, all different, and such that it stays when points are added.

    Letters, digits and _ . + - only. One that is too long, or that two points would have, ends in a hash.
    """
    written = ["-".join(_part(key, value) for key, value in point.items()) or "base" for point in points]
    often = Counter(written)
    return [
        label if len(label) <= LONGEST_LABEL and often[label] == 1 else f"{label[: LONGEST_LABEL - 9]}-{_hash(point)}"
        for label, point in zip(written, points, strict=True)
    ]


def _part(key: str, value: JsonValue) -> str:
    if key == ENTRY_NAME:
        return str(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        text = repr(value)
    else:
        text = "_" + (value if isinstance(value, str) else json.dumps(value))
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", f"{SHORT.get(key, key)}{text}").rstrip("_")


def _hash(point: Settings) -> str:
    return hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:8]


def read_sweep(path: Path) -> Sweep:
    """Read a SWEEP.json. Raises UserError naming the file, the key and the remedy."""
    return parse_config(Sweep, read_json_object(path), path)


def sweep_schema() -> dict[str, Any]:
    """The JSON Schema of a SWEEP.json for editors: it knows the keys of model.json and train.json."""
    schema = Sweep.model_json_schema()
    known = known_keys()
    keys = {key: known[key] for key in known if key in MODEL_KEYS or key in TRAIN_KEYS}
    lists = {key: {"type": "array", "items": of, "minItems": 1} for key, of in keys.items()}
    settings = {"type": "object", "properties": keys, "additionalProperties": False}
    properties = schema["properties"]
    properties["set"] |= settings
    properties["vary"] |= {"type": "object", "properties": lists, "additionalProperties": False}
    named = {ENTRY_NAME: {"type": "string", "description": "What its runs are called, in place of all its keys."}}
    properties["together"]["items"] = {**settings, "properties": named | keys}
    searched = {key: {"anyOf": [RANGE_SCHEMA, {**of, "minItems": 2}]} for key, of in lists.items()}
    searched = {key: searched[key] for key in searched if key not in NOT_SEARCHED}
    properties["search"] |= {"type": "object", "properties": searched, "additionalProperties": False}
    properties["pruning"] = {**Pruning.model_json_schema(), "description": properties["pruning"]["description"]}
    schema.pop("$defs", None)
    properties[SCHEMA_KEY] = {"type": "string", "description": "Where an editor finds this schema; without effect."}
    return schema
