"""Settings of runs and what they ran on, as far as these differ between them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.comparison.records import RunRecord
from harness.model.config import ModelConfig

HASH_CHARACTERS = 8
NOT_RECORDED = "not recorded"


def settings_of(record: RunRecord) -> dict[str, Any]:
    """Keys of model.json and train.json, then those of the data's content, the machine and torch, by name; a key that
    nothing says is not there. A model that an earlier version recorded has the defaults of keys that it did not know.
    """
    settings = {**(ModelConfig.defaults() if record.model else {}), **record.model, **record.train}
    content = _content(record.dataset)
    machine = machine_of(record)
    known = {"dataset_content": content, "machine": machine, "torch": record.torch}
    return settings | {key: value for key, value in known.items() if value is not None}


def machine_of(record: RunRecord) -> str | None:
    """The devices that it was trained on, such as "2 x NVIDIA H100"."""
    if record.device is None or record.world_size is None:
        return None
    return f"{record.world_size} x {record.device}"


def _content(dataset: Mapping[str, Any]) -> str | None:
    hashes = [split.get("sha256") for split in dataset.values() if isinstance(split, Mapping)]
    return " ".join(str(digest)[:HASH_CHARACTERS] for digest in hashes) or None


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys with more than one value, in the order of the first that has them. A run that does not say a key, as one
    of an earlier version, does not make it differ."""
    keys = list(dict.fromkeys(key for each in settings for key in each))
    return [key for key in keys if len({as_text(each[key]) for each in settings if key in each}) > 1]


def as_text(value: object) -> str:
    """A setting as JSON writes it, a text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value)
