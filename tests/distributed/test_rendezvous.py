"""Ranks that torchrun starts again do not take what an earlier start has left for today's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from harness.common.errors import RunError
from harness.distributed.rendezvous import agree_on_restart_id

SIZE = 4


def agree(store: HashStore, ranks: range = range(SIZE), timeout: float = 20.0) -> list[str]:
    """The restart ids that ranks which start at the same time come to."""
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: agree_on_restart_id(store, rank, SIZE, timeout), ranks))


def test_every_start_has_an_id_of_its_own() -> None:
    store = HashStore()
    starts = [set(agree(store)) for _ in range(5)]
    assert all(len(ids) == 1 for ids in starts)
    assert len(set.union(*starts)) == 5


@pytest.mark.parametrize("there", [range(2), range(1, SIZE)])
def test_a_start_that_ended_while_its_ranks_met(there: range) -> None:
    """Some had come, had asked and were answered; the next start's ranks all find one another."""
    store = HashStore()
    with pytest.raises(RunError, match=r"rank [02] has not joined the others in time"):
        agree(store, there, timeout=0.3)
    assert len(set(agree(store))) == 1
