"""A finished run, trained once for all tests here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.launch import Workshop


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The run r on the text local/letters, with checkpoints of steps 0, 10 and later."""
    shop = Workshop(tmp_path_factory.mktemp("trained"), {"TIKTOKEN_CACHE_DIR": "none"})
    shop.add_dataset()
    shop.add_run(validation_interval=10)
    shop.train(ranks=1)
    return shop


@pytest.fixture
def shop(trained: Workshop, tmp_path: Path) -> Workshop:
    """A copy of the run of the test's own."""
    shutil.copytree(trained.path, tmp_path / "shop", symlinks=True)
    return Workshop(tmp_path / "shop", dict(trained.environment))
