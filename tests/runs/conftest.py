"""Fixtures of the tests of a run's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.configs import WriteModel, WriteTrain, model_in, train_in
from tests.support.launch import Workshop


@pytest.fixture
def train(tmp_path: Path) -> WriteTrain:
    """Writes and loads a train.json with some keys changed."""
    return train_in(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> WriteModel:
    """Writes and loads a model.json with some keys changed."""
    return model_in(tmp_path)


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    """A folder for runs, with a small data set."""
    made = Workshop(tmp_path)
    made.add_dataset()
    return made
