"""How ranks that torchrun has started together find one another, and no others.

torchrun may start a job's ranks several times (--max-restarts), and keeps one store for all these lives: what the ranks
of an earlier one have left in it, such as addresses at which nobody listens any more, would be taken for today's. Nor
can TORCHELASTIC_RESTART_COUNT tell lives apart, because every node counts its own. So rank 0 makes up a name for each
life; whoever asks for it does so under a name that is as new, and so can get no answer that was meant for another.
"""

from __future__ import annotations

import secrets
import time
from typing import Protocol

from harness.common.errors import RunError

POLL_SECONDS = 0.02


class Store(Protocol):
    """Of torch.distributed's stores, what is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def agree_on_restart_id(store: Store, rank: int, size: int, patience_seconds: float) -> str:
    """A name that all `size` ranks of this life of the job have, and no other life's. Returns when all are there.

    Raises RunError naming a rank that has not come in time.
    """
    deadline = time.monotonic() + patience_seconds
    if rank == 0:
        return _give_name(store, size, deadline)
    question = secrets.token_hex(8)
    store.set(f"asks/{rank}", question)
    _await(store, f"answers/{question}", 0, deadline)
    name = store.get(f"answers/{question}").decode()
    store.set(f"{name}/knows/{rank}", "")
    return name


def _give_name(store: Store, size: int, deadline: float) -> str:
    """Answer every question there is, old ones too, until each rank says that it knows."""
    name, answered = secrets.token_hex(8), set()
    for rank in range(1, size):
        while not store.check([f"{name}/knows/{rank}"]):
            _await(store, f"asks/{rank}", rank, deadline)
            question = store.get(f"asks/{rank}").decode()
            if question not in answered:
                store.set(f"answers/{question}", name)
                answered.add(question)
            elif time.monotonic() > deadline:
                raise _absence(rank)
            else:
                time.sleep(POLL_SECONDS)
    return name


def _await(store: Store, key: str, rank: int, deadline: float) -> None:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise _absence(rank)
        time.sleep(POLL_SECONDS)


def _absence(rank: int) -> RunError:
    return RunError(f"rank {rank} has not joined the others in time; look for its own error, or its machine's")
