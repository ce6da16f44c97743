"""The two JSON files of a run as tests write them, and a check of the message that refuses one of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.model.config import ModelConfig, load_model_config
from harness.runs.train_config import TrainConfig, load_train_config

# Keys that are enough for a run, with the lab notebook's values.
SEED_TRAIN: dict[str, Any] = {
    "dataset": "owner/name",
    "microbatch_size": 13,
    "min_train_tokens": 3_260_190_720,
    "start_train_token": 0,
    "validation_interval": 617,
    "validation_batches": 300,
    "start_val_token": 50_000_000,
}
SEED_MODEL: dict[str, Any] = {
    "vocab_size": 50257,
    "context_length": 1024,
    "emb_dim": 768,
    "n_heads": 12,
    "n_layers": 12,
    "drop_rate": 0.1,
    "qkv_bias": False,
}

WriteTrain = Callable[..., TrainConfig]
WriteModel = Callable[..., ModelConfig]


def changed(base: dict[str, Any], changes: dict[str, Any]) -> str:
    """Return the JSON of `base` with some keys replaced. A key whose new value is `...` is left out."""
    return json.dumps({key: value for key, value in {**base, **changes}.items() if value is not ...})


def writer(path: Path, base: dict[str, Any], load: Callable[[Path], Any]) -> Callable[..., Any]:
    """Return a function that writes `base` with some keys changed to a file, and loads the file."""

    def write_and_load(**changes: Any) -> Any:
        path.write_text(changed(base, changes))
        return load(path)

    return write_and_load


def train_in(folder: Path) -> WriteTrain:
    return writer(folder / "train.json", SEED_TRAIN, load_train_config)


def model_in(folder: Path) -> WriteModel:
    return writer(folder / "model.json", SEED_MODEL, load_model_config)


def refusal(load: Callable[..., object], *arguments: Any, begins: Any = None, **changes: Any) -> str:
    """Return the message with which `load` refuses its input. It must be one line that begins with `begins` or, without
    it, with the path of a JSON file."""
    with pytest.raises(UserError) as caught:
        load(*arguments, **changes)
    message = str(caught.value)
    assert message.splitlines() == [message], "more than one line"
    named = re.match(r"\S+\.json(:\d+)?: ", message) if begins is None else message.startswith(begins)
    assert named, f"begins otherwise: {message}"
    return message
