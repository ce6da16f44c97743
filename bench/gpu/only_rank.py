"""A world of one rank that does all that a rank does among several: it joins a process group, with NCCL on a GPU, wraps
the model in DistributedDataParallel, and shards the optimizer's state. NCCL refuses two ranks on one GPU."""

from __future__ import annotations

import os
import runpy
import socket

from harness.distributed import environment
from harness.distributed.environment import STORE_DESCRIPTOR, Ranking


class OnlyRank(int):
    """The number 1 as the number of ranks. Code that treats a single rank specially takes it for more than one."""

    def __gt__(self, other: object) -> bool:
        return other == 1 or int(self) > other  # type: ignore[operator]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnlyRank)

    __hash__ = int.__hash__


def train_alone() -> None:
    """Run ddp_train.py, with this process's arguments, as the only rank of such a world."""
    store = socket.create_server(("127.0.0.1", 0))  # the rank takes it over
    host, port = store.getsockname()
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), STORE_DESCRIPTOR: str(store.detach())}
    # On its machine it counts as one, because there may be only one GPU. So this must be set as for several machines.
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    environment.read_ranking = lambda: Ranking(world_size=OnlyRank(1), local_world_size=1)
    runpy.run_path("ddp_train.py", run_name="__main__")
