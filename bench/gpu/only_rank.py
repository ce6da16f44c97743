"""A world of one rank that does all that a rank does among several: it joins a process group, with NCCL on a GPU, wraps
the model in DistributedDataParallel, and shards the optimizer's state. NCCL refuses two ranks on one GPU."""

from __future__ import annotations

import os
import socket

from harness.distributed import environment
from harness.distributed.environment import STORE_DESCRIPTOR, Ranking

stores: list[socket.socket] = []  # open as long as the process runs


class OnlyRank(int):
    """The number 1 as the number of ranks. Code that treats a single rank specially takes it for more than one."""

    def __gt__(self, other: object) -> bool:
        return other == 1 or int(self) > other  # type: ignore[operator]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnlyRank)

    __hash__ = int.__hash__


def connect_alone() -> None:
    """Make ddp_train.py in this process the only rank of such a world."""
    stores.append(socket.create_server(("127.0.0.1", 0)))
    host, port = stores[0].getsockname()
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), STORE_DESCRIPTOR: str(stores[0].fileno())}
    environment.read_ranking = lambda: Ranking(world_size=OnlyRank(1), local_world_size=OnlyRank(1))
