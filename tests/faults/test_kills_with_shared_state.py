"""Killed at any instant, with Muon and an optimizer state that is shared out.

Before rank 0 writes it, the state of all ranks is gathered; after a kill of any rank at any time the same
command again must reach the end of a run that nothing happened to, bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.test_kills import (
    EACH_OF,
    LONG,
    SETTINGS,
    Call,
    kill_again_and_again,
    kill_everywhere,
)
from tests.support import file_operations
from tests.support.jobs import set_pace
from tests.support.launch import Workshop

pytestmark = pytest.mark.slow

SHARED: dict[str, Any] = {"optimizer": "muon", "muon_momentum_warmup_steps": 5, "shard_optimizer": True}
LATEST_AND_BEST = Call("save", 2, SHARED)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> Workshop:
    """A dataset, and a run that nothing happens to."""
    set_pace(exhaustive)
    shop = Workshop(tmp_path_factory.mktemp("shared"))
    shop.add_dataset()
    shop.add_run("straight", **SETTINGS | SHARED)
    shop.train("straight", prelude=file_operations.WITHOUT_CHARTS)
    return shop


@pytest.mark.fault(
    "killed in a save of shared state", "at every file operation: all checkpoints are whole; continued to the same end"
)
@pytest.mark.timeout(900)
def test_killed_at_each_operation_of_a_save(shop: Workshop, exhaustive: bool) -> None:
    kill_everywhere(shop, [LATEST_AND_BEST], 1 if exhaustive else 2 * EACH_OF)


@pytest.mark.fault(
    "killed again and again with shared state", "20 times, any rank at any instant: continued to the same end"
)
@pytest.mark.timeout(900)
def test_killed_at_random_instants(shop: Workshop, exhaustive: bool) -> None:
    """A rank in turn after each phase's beginning: joining, start-up, training, validation, save."""
    kills = 20 if exhaustive else 5
    kill_again_and_again(shop, LONG | SHARED, kills)
