"""A SWEEP.json: which runs to derive from a base, what they are called, and what the file must look like."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag, model_validator

from harness.common.errors import UserError
from harness.common.files import check_name
from harness.common.json_files import SCHEMA_KEY, parse_config, read_json_object
from harness.common.messages import quoted
from harness.sweeps.derived_runs import MODEL_KEYS, TRAIN_KEYS, Base, DerivedRun, derive, explained, unknown_key

LARGEST_POINTS = 1000  # beyond it a sweep is a typing error, or wants another program
LONGEST_NAME = 60  # characters of a sweep's name
LONGEST_LABEL = 60  # characters of the part of a run's name that says what differs
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
OTHER_TEXT = "it says what the loss is measured on, so that trials would not compare"
# Keys that cannot be searched for the lowest validation loss, and why.
NOT_SEARCHED = {
    "random_seed": "the lowest loss would be the luckiest seed's; vary it in a sweep",
    "microbatch_size": f'{OTHER_TEXT}; search "global_batch_size"',
    "minibatch_size": f'{OTHER_TEXT}; search "global_batch_size"',
    **dict.fromkeys(("dataset", "vocab_size", "context_length", "validation_batches", "start_val_token"), OTHER_TEXT),
    "validation_interval": 'it says when the loss is measured, not what it is; give one in "set"',
}


class Pruning(BaseModel):
    """Condition for pruning a trial of a search: its lowest validation loss so far is above the median that the
    finished trials had after as many tokens."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    after_trials: int = Field(default=5, ge=1, le=LARGEST_POINTS)
    after_share: float = Field(default=0.3, ge=0, le=1)  # of a trial's tokens


class Range(BaseModel):
    """Numbers from `min` to `max`, both included: equally likely before anything is known, or their logarithms."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    min: int | float
    max: int | float
    log: bool = False
    step: Annotated[int | float | None, Field(gt=0)] = None  # None: 1 for whole numbers, any for others


Domain = Annotated[  # told apart before they are checked, so that an error is about the one that was meant
    Annotated[Range, Tag("dict")] | Annotated[list[JsonValue], Tag("list")],
    Discriminator(lambda raw: "list" if isinstance(raw, list) else "dict"),
]


class Sweep(BaseModel):
    """A SWEEP.json: every combination of `vary`'s values and `together`'s entries is a run; or, with `search`, each of
    `trials` runs is chosen by the results of the earlier ones."""

    model_config = ConfigDict(title="SWEEP.json", frozen=True, strict=True, extra="forbid")

    base: str = Field(min_length=1)  # the run to derive from
    name: str | None = None  # the beginning of the runs' names; None: the file's name
    set: Settings = {}  # alike in all runs, but where an entry of `together` changes them
    vary: dict[str, list[JsonValue]] = {}
    together: list[Settings] = []
    search: dict[str, Domain] = {}
    trials: int | None = Field(default=None, ge=1, le=LARGEST_POINTS)
    objective: Literal["final_validation_loss", "best_validation_loss"] = "final_validation_loss"
    pruning: Pruning = Pruning()
    sampler_seed: int = Field(default=0, ge=0, lt=2**63)

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

    @model_validator(mode="after")
    def _possible(self) -> Sweep:
        together = dict.fromkeys(key for entry in self.together for key in entry if key != ENTRY_NAME)
        for place, keys in (("set", self.set), ("together", together), ("vary", self.vary), ("search", self.search)):
            if wrong := unknown_key([*keys]):
                raise ValueError(f'in "{place}": {wrong}')
        if self.is_search:
            self._check_search()
            return self
        if not self.vary and not self.together:
            raise ValueError('keys "vary" and "together": give at least one of them; derive_run.py makes a single run')
        for key, values in self.vary.items():
            if not values:
                raise ValueError(f'key "vary.{key}": has no values; give at least one, or remove the key')
        # A key has one place; but what `set` gives to all runs, entries of `together` may change, if not all do.
        in_all = [key for key in together if all(key in entry for entry in self.together)]
        twice = [key for key in self.vary if key in together]
        twice += [key for key in self.set if key in [*self.vary, *in_all]]
        if twice:
            raise ValueError(f'key "{twice[0]}": given in two of "set", "vary" and "together"; keep one')
        self._check_names()
        if self.count > LARGEST_POINTS:
            raise ValueError(
                f'keys "vary" and "together": make {self.count:,} runs; a sweep can have {LARGEST_POINTS:,}'
            )
        return self

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
        for key in self.search:
            if key in NOT_SEARCHED:
                raise ValueError(f'in "search": key "{key}": cannot be searched: {NOT_SEARCHED[key]}')
            if key in self.set:
                raise ValueError(f'key "{key}": given in "set" and in "search"; keep one')

    @property
    def count(self) -> int:
        """Number of runs it makes."""
        return math.prod(len(values) for values in self.vary.values()) * max(1, len(self.together))

    def points(self) -> Iterator[Settings]:
        """Settings in which each run differs from the base and from `set`, in the order of the file, the last key
        fastest; and "name", where an entry of `together` has one."""
        for entry in self.together or [{}]:
            for values in itertools.product(*self.vary.values()):
                yield {**entry, **dict(zip(self.vary, values, strict=True))}

    def labels(self) -> list[str]:
        """Suffixes of the runs' names, one for each point: an entry's own name stands for all that the entry sets."""
        named = (ENTRY_NAME, *self.vary)
        return labels(
            [{key: each[key] for key in named if key in each} if ENTRY_NAME in each else each for each in self.points()]
        )


def labels(points: list[Settings]) -> list[str]:
    """A name for each point, of what may differ: short, all different, and such that it stays when points are added.

    Letters, digits and _ . + - only. One that is too long, or that two points would have, ends in a hash.
    """
    written = ["-".join(_part(key, value) for key, value in point.items()) or "base" for point in points]
    often, found = Counter(written), []
    for label, point in zip(written, points, strict=True):
        if len(label) > LONGEST_LABEL or often[label] > 1:
            digest = hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()
            label = f"{label[: LONGEST_LABEL - 9]}-{digest[:8]}"
        found.append(label)
    return found


def _part(key: str, value: JsonValue) -> str:
    if key == ENTRY_NAME:
        return str(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        text = repr(value)
    else:
        text = "_" + (value if isinstance(value, str) else json.dumps(value))
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", f"{SHORT.get(key, key)}{text}").rstrip("_")


@dataclass(frozen=True)
class SweepRuns:
    """A sweep's file, and the runs that it describes, checked; none of them may be on the disk yet."""

    path: Path
    name: str
    runs_dir: Path
    runs: list[DerivedRun]

    def missing(self) -> list[DerivedRun]:
        """Runs that are not made yet. Raises UserError if a folder holds another run, or if training would refuse one
        of these, so that nothing is made."""
        found = [run for run in self.runs if not run.is_made()]
        for run in found:
            with explained(f"{self.path}: makes "):
                run.check_startable()
        return found


def read_sweep(path: Path) -> Sweep:
    """Read a SWEEP.json. Raises UserError naming the file, the key and the remedy."""
    return parse_config(Sweep, read_json_object(path), path)


def load_sweep(path: Path, runs_dir: Path) -> SweepRuns:
    """Read a SWEEP.json and derive its runs, each checked as a run is; nothing is written.

    Raises UserError naming the file, the key and the remedy.
    """
    sweep = read_sweep(path)
    if sweep.is_search:
        raise UserError(
            f'{path}: key "search": makes its runs one by one as it trains them: '
            f"`sweep_runs.py search {path} DATASETS_DIR`"
        )
    name, base = name_and_base(sweep, path, runs_dir)
    runs: dict[str, DerivedRun] = {}  # by their settings
    for label, point in zip(sweep.labels(), sweep.points(), strict=True):
        changes = {key: value for key, value in {**sweep.set, **point}.items() if key != ENTRY_NAME}
        with explained(f"{path}: makes "):
            run = derive(base, f"{name}-{label}", changes, name)
        twin = runs.setdefault(json.dumps(run.settings), run)
        if twin is not run:
            raise UserError(
                f"{path}: makes {twin.name} and {run.name}, which would be the same run; remove one of their values"
            )
    return SweepRuns(path, name, runs_dir, list(runs.values()))


def name_and_base(sweep: Sweep, path: Path, runs_dir: Path) -> tuple[str, Base]:
    """The sweep's name and the run to derive from. Raises UserError."""
    name = path.stem if sweep.name is None else sweep.name
    with explained(f'{path}: key "name" (or else the file\'s): '):
        if len(name) > LONGEST_NAME:
            raise UserError(f"longer than {LONGEST_NAME} characters")
        check_name(name, "sweep")
    with explained(f'{path}: key "base": '):
        return name, Base.load(runs_dir, sweep.base)
