"""Share of a held-out split that a model was trained on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from harness.common.errors import UserError
from harness.common.statistics import Inconclusive
from harness.data.dataset import Dataset, TokenFile, remembered
from harness.data.ngrams import NGRAM, Overlap, find_overlap
from harness.data.tokenizers import load_tokenizer
from harness.runs.trained_model import TrainedModel

NAME_CHARACTERS = 12
GPT2_EOT_TOKEN = 50256  # known without GPT-2's vocabulary, which may not be on this machine


def training_overlap(model: TrainedModel, held_out: Dataset, split: str, datasets_dir: Path) -> Overlap | Inconclusive:
    """Return how much of a split is also in the model's train splits, or the reason why this is not known.

    `held_out` must have the model's tokenizer. The first call may read the whole train splits; its result is saved if
    DATASETS_DIR can be written. Raises UserError if the held-out split or its tokenizer cannot be read.
    """
    try:
        training = _train_splits(model, datasets_dir)
    except UserError as error:
        return Inconclusive(str(error))
    if _dict(model.meta, "train").get("initial_weights") is not None:
        return Inconclusive("the model began with initial_weights, and what those were trained on is not recorded")
    if not training:
        return Inconclusive("it is not recorded which dataset the model was trained on")
    files = [file.fingerprint() for file in (held_out.split(split), *training)]
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:NAME_CHARACTERS]
    tokenizer = held_out.tokenizer
    eot_token = load_tokenizer(tokenizer).eot_token if isinstance(tokenizer, Path) else GPT2_EOT_TOKEN

    def scan() -> Overlap:
        return find_overlap(held_out.split(split), training, eot_token)

    found = remembered(held_out, f"{split}--in-training-{digest}", files, Overlap, scan)
    return found if found.ngrams else Inconclusive(f"the split's documents have no {NGRAM}-grams to compare")


def _train_splits(model: TrainedModel, datasets_dir: Path) -> list[TokenFile]:
    """Return the train splits of the model's datasets. Raises UserError if one of them is missing or unreadable, or if
    its fingerprint is not the recorded one."""
    recorded = _dict(model.meta, "dataset")
    found = []
    for name in model.datasets:
        file = Dataset.open(datasets_dir, name).split("train")
        source = _dict(_dict(recorded, "sources"), name) or recorded
        digest = _dict(source, "train").get("sha256")
        if digest not in (None, file.fingerprint()):
            raise UserError(f"{file.path}: not the train split that the model was trained on")
        found.append(file)
    return found


def _dict(values: dict[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}
