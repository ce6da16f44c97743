"""Fixtures of the tests of a run's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.configs import WriteModel, WriteTrain, model_in, train_in


@pytest.fixture
def train(tmp_path: Path) -> WriteTrain:
    """Writes and loads a train.json with some keys changed."""
    return train_in(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> WriteModel:
    """Writes and loads a model.json with some keys changed."""
    return model_in(tmp_path)
