"""Fixtures of the tests that run sweeps in this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from harness.common.errors import STOPPING_SIGNALS
from harness.sweeps import run as sweep_run


@pytest.fixture(autouse=True)
def runners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make runners poll often, because these runs take no time, and restore the signal handlers that they replace."""
    monkeypatch.setattr(sweep_run, "POLL_SECONDS", 0.01)
    before = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
