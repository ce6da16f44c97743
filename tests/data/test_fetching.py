"""The download of a training run's dataset: once per node, however long it takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from tests.support.fake_hub import FakeHub
from tests.support.launch import Workshop, metrics

NAME = "someone/corpus"
COLLECTIVE_TIMEOUT_SECONDS = 3


def corpus() -> dict[str, bytes]:
    steps = np.random.default_rng(0).integers(0, 4, 4000)
    tokens = (np.cumsum(steps) % 64).astype(np.uint16)
    meta = {"description": "x", "token_dtype": "uint16", "files": {"train": "train.safetensors"}}
    return {
        "train.safetensors": save({"tokens": tokens}),
        "validation.safetensors": save({"tokens": tokens[:500]}),
        "meta.json": json.dumps(meta).encode(),
    }


@pytest.mark.slow
def test_a_download_longer_than_the_collective_timeout(tmp_path: Path) -> None:
    """Only local rank 0 downloads, and the other ranks wait longer than the timeout of a collective."""
    with FakeHub() as hub:
        dataset = hub.add_dataset(NAME, corpus())
        dataset.files["train.safetensors"].delay_seconds = 2 * COLLECTIVE_TIMEOUT_SECONDS
        shop = Workshop(tmp_path, hub.environment(tmp_path / "hf"))
        shop.environment |= {"COLLECTIVE_TIMEOUT_SECONDS": str(COLLECTIVE_TIMEOUT_SECONDS), "HF_HUB_OFFLINE": "0"}
        run = shop.add_run(dataset=NAME, min_train_tokens=256)
        shop.train(ranks=2)
        assert [event["event"] for event in metrics(run)].count("validation") == 2
        assert len(hub.seen("GET", "train.safetensors")) <= 2  # the Hub's own address and the storage it points to
        asked = len(hub.requests)
        # The dataset is complete, so the second training sends no request.
        shop.train("r", "--restart", ranks=1)
        assert len(hub.requests) == asked
