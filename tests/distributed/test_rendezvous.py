"""Ranks that torchrun starts again do not take what an earlier life has left for today's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from harness.common.errors import RunError
from harness.distributed.rendezvous import agree_on_restart_id

SIZE = 4


def live(store: HashStore, ranks: range = range(SIZE), patience: float = 20.0) -> list[str]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: agree_on_restart_id(store, rank, SIZE, patience), ranks))


def test_every_life_has_a_name_of_its_own() -> None:
    store = HashStore()
    lives = [set(live(store)) for _ in range(5)]
    assert all(len(names) == 1 for names in lives)
    assert len(set.union(*lives)) == 5


@pytest.mark.parametrize("there", [range(2), range(1, SIZE)])
def test_a_life_that_ended_while_its_ranks_met(there: range) -> None:
    """Some had come, had asked and were answered; the next life's ranks all find one another."""
    store = HashStore()
    with pytest.raises(RunError, match=r"rank [02] has not joined the others in time"):
        live(store, there, patience=0.3)
    assert len(set(live(store))) == 1
