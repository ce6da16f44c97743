"""The format of SWEEP.json, and the runs that such a file describes, with their names."""

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
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from harness.common.errors import UserError, explained
from harness.common.files import SAFE_NAME, check_name
from harness.common.json_files import SCHEMA_KEY, parse_config, read_json_object
from harness.common.messages import abbreviated, paragraph, quoted
from harness.sweeps.derived_runs import MODEL_KEYS, TRAIN_KEYS, DerivedRun, derive, load_base, unknown_key

LARGEST_POINTS = 1000  # more runs are probably a typing error, or need another program
LONGEST_LABEL = 60  # characters of a label, the part of a run's name that follows the sweep's name
# Short forms of the keys that are varied most, for the names of runs. Other keys appear in full.
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

ENTRY_NAME = "name"  # key in an entry of `together` that is not a setting, but names the entry's runs
Settings = dict[str, JsonValue]


class Sweep(BaseModel):
    """Contents of a SWEEP.json, without the key "$schema". One run is made for each combination of an entry of
    `together` with one value of each key of `vary`. Either `together` or `vary` may be left out."""

    model_config = ConfigDict(title="SWEEP.json", frozen=True, strict=True, extra="forbid")

    base: str = Field(min_length=1)  # the run to derive from
    name: str | None = None  # the runs' names begin with it; None: the name of the file
    set: Settings = {}  # for all runs; entries of `together` can change these
    vary: dict[str, Annotated[list[JsonValue], Field(min_length=1)]] = {}  # lists of values, by key
    together: list[Settings] = []  # each entry sets several keys at once
    # Ceilings of `sweep_runs.py run`, for all runs together.
    max_hours: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_dollars: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _explain_settings(cls, raw: Any) -> Any:
        """Reject settings at the top level with a message that they belong in "set" or in "vary". Remove the key
        "$schema", which only editors use."""
        if not isinstance(raw, dict):
            return raw
        for key in raw:
            if key not in cls.model_fields and (key in MODEL_KEYS or key in TRAIN_KEYS):
                raise ValueError(
                    f'key "{key}": belongs in "set" (one value for all runs) or in "vary" (a list of values)'
                )
        return {key: value for key, value in raw.items() if key != SCHEMA_KEY}

    @model_validator(mode="after")
    def _possible(self) -> Sweep:
        together = dict.fromkeys(key for entry in self.together for key in entry if key != ENTRY_NAME)
        for place, keys in (("set", self.set), ("together", together), ("vary", self.vary)):
            if wrong := unknown_key(keys):
                raise ValueError(f'in "{place}": {wrong}')
            if "on_end" in keys:
                raise ValueError(
                    f'in "{place}": key "on_end": would run after each run; start its command after sweep_runs.py ends'
                )
            if "notify" in keys and place != "set":
                raise ValueError(f'in "{place}": key "notify": its URL would be in the names of runs; give it in "set"')
        if not self.vary and not self.together:
            raise ValueError('keys "vary" and "together": give at least one of them; derive_run.py makes a single run')
        # A key must be given in one place only, with one exception: some entries of `together`, but not all, may
        # override a key of `set`.
        in_all = [key for key in together if all(key in entry for entry in self.together)]
        twice = [key for key in self.vary if key in together]
        twice += [key for key in self.set if key in [*self.vary, *in_all]]
        if twice:
            raise ValueError(f'key "{twice[0]}": given in two of "set", "vary" and "together"; keep one')
        names = [entry[ENTRY_NAME] for entry in self.together if ENTRY_NAME in entry]
        for name in names:
            if not isinstance(name, str) or not SAFE_NAME.fullmatch(name):
                raise ValueError(
                    f'in "together": key "name": {quoted(name)} must be a plain name of ASCII letters, '
                    "digits and _.+- that does not begin with . + or -"
                )
            if names.count(name) > 1:
                raise ValueError(f'in "together": key "name": {quoted(name)} is given twice; give each entry its own')
        count = math.prod(len(values) for values in self.vary.values()) * max(1, len(self.together))
        if count > LARGEST_POINTS:
            raise ValueError(
                f'keys "vary" and "together": make {count:,} runs; a sweep can have at most {LARGEST_POINTS:,}'
            )
        return self

    def points(self) -> Iterator[tuple[Settings, Settings]]:
        """Yield two dicts for each run: the settings that appear in its name, and all settings that the sweep changes.
        In the first dict, the name of an entry of `together` replaces its settings. The last key of `vary` changes
        fastest."""
        for entry in self.together or [{}]:
            shown = {ENTRY_NAME: entry[ENTRY_NAME]} if ENTRY_NAME in entry else entry
            changed = {key: value for key, value in {**self.set, **entry}.items() if key != ENTRY_NAME}
            for values in itertools.product(*self.vary.values()):
                varied = dict(zip(self.vary, values, strict=True))
                yield {**shown, **varied}, {**changed, **varied}


def labels(points: list[Settings]) -> list[str]:
    """Return a label for each point (the settings that appear in a run's name), of letters, digits and _ . + -.

    - Different points have different labels: a hash ends each label that would be too long or equal to another.
    - An additional point changes only labels that would be equal to its own.
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
    text = value if isinstance(value, str) else json.dumps(value)
    gap = "" if isinstance(value, int | float) and not isinstance(value, bool) else "_"
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", f"{SHORT.get(key, key)}{gap}{text}").rstrip("_")


@dataclass(frozen=True)
class SweepRuns:
    """A SWEEP.json and its derived runs, whose folders need not exist yet."""

    path: Path
    name: str
    runs: list[DerivedRun]
    max_hours: float | None = None
    max_dollars: float | None = None

    def missing(self) -> list[DerivedRun]:
        """Return the runs whose folders do not exist yet. Raises UserError as `DerivedRun.is_made` does, or if
        `check_startable` refuses one of these runs."""
        found = [run for run in self.runs if not run.is_made()]
        for run in found:
            with explained(f"{self.path}: makes "):
                run.check_startable()
        return found

    def overruled(self) -> list[str]:
        """Return the lines of a note on settings that differ between the sweep and the folders of its unfinished runs;
        [] if none do. All folders must exist. Raises UserError if a file in one of them is damaged."""
        found: dict[str, list[str]] = {}  # names of runs, by the key
        for run in (each for each in self.runs if not each.directory.summary.exists()):
            there = run.settings_there()
            for key in [key for key, value in run.settings.items() if there[key] != value]:
                found.setdefault(key, []).append(run.name)
        names = [*dict.fromkeys(name for each in found.values() for name in each)]
        said = f"note: {', '.join(found)}: training uses the values in train.json of {abbreviated(names)}"
        return paragraph(f"{said}, which differ from the sweep's") if found else []


def load_sweep(path: Path, runs_dir: Path) -> SweepRuns:
    """Read a SWEEP.json and derive its runs. Raises UserError if the file, its base run or a derived run is wrong, or
    if two derived runs are the same."""
    sweep = parse_config(Sweep, read_json_object(path), path)
    name = path.stem if sweep.name is None else sweep.name
    with explained(f'{path}: key "name" (by default the file\'s name): '):
        check_name(name, "sweep")
    with explained(f'{path}: key "base": '):
        base = load_base(runs_dir, sweep.base)
    shown, changes = zip(*sweep.points(), strict=True)
    runs: dict[str, DerivedRun] = {}  # by their settings
    for label, changed in zip(labels([*shown]), changes, strict=True):
        with explained(f"{path}: makes "):
            run = derive(base, f"{name}-{label}", changed, name)
        twin = runs.setdefault(json.dumps(run.settings), run)
        if twin is not run:
            raise UserError(
                f"{path}: makes {twin.name} and {run.name}, which would be the same run; remove one value or entry"
            )
    return SweepRuns(path, name, list(runs.values()), sweep.max_hours, sweep.max_dollars)
