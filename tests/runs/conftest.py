"""Fixtures of the tests of a run's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.configs import WriteModel, WriteTrain, model_in, train_in
from tests.support.in_process import InProcess


@pytest.fixture
def shop(tmp_path: Path) -> InProcess:
    """A folder for runs, with a small dataset. Commands run in the test's process, because processes are not the
    subject of these tests; `train` still starts processes."""
    made = InProcess(tmp_path)
    made.add_dataset()
    return made


@pytest.fixture
def train(tmp_path: Path) -> WriteTrain:
    """Function that writes a train.json with some keys changed and loads it."""
    return train_in(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> WriteModel:
    """Function that writes a model.json with some keys changed and loads it."""
    return model_in(tmp_path)
