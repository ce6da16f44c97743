"""Fixtures: a finished run, trained once for all tests of this folder, and a fake judge."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_judge import FakeJudge
from tests.support.in_process import InProcess
from tests.support.judging import KEY, Bench


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    """A workshop with the run r, trained on the dataset local/letters, with checkpoints of steps 0, 10 and later."""
    shop = InProcess(tmp_path_factory.mktemp("trained"), {"TIKTOKEN_CACHE_DIR": "none"})
    shop.add_dataset()
    shop.add_run(validation_interval=10)
    assert shop.attempt().status == 0
    return shop


@pytest.fixture
def shop(trained: InProcess, tmp_path: Path) -> InProcess:
    """The test's own copy of the trained workshop."""
    shutil.copytree(trained.path, tmp_path / "shop", symlinks=True)
    return InProcess(tmp_path / "shop", dict(trained.environment))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """The answers of three models, and the test's own fake judge."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.02)
    with FakeJudge() as fake:
        yield Bench(fake, tmp_path)
