"""A finished run, trained once for all tests here, and a judge."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_judge import FakeJudge
from tests.support.judging import KEY, Bench
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


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Three models' answers, and a judge of the test's own."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.02)
    with FakeJudge() as fake:
        yield Bench(fake, tmp_path)
