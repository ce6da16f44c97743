"""Fixtures of the tests that run sweeps in this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from harness.common.errors import STOPPING_SIGNALS
from harness.sweeps import run as sweep_run


@pytest.fixture(autouse=True)
def runners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runner listens to signals from then on. It looks often: these runs take no time."""
    monkeypatch.setattr(sweep_run, "POLL_SECONDS", 0.01)
    before = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
