"""A world of one rank with a process group, DistributedDataParallel and a sharded optimizer.

One GPU offers no other way to measure these parts, because NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import os
import runpy
import socket

from harness.distributed import environment
from harness.distributed.environment import STORE_DESCRIPTOR, Ranking


class OnlyRank(int):
    """The number 1 as the number of ranks. For it, `> 1` is true and `== 1` false: code runs as for several ranks."""

    def __gt__(self, other: object) -> bool:
        return other == 1 or int(self) > other  # type: ignore[operator]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnlyRank)

    __hash__ = int.__hash__


def train_alone() -> None:
    """Run ddp_train.py, with this process's arguments, on a single rank that trains as if it were one of several."""
    store = socket.create_server(("127.0.0.1", 0))  # the rank takes it over
    host, port = store.getsockname()
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), STORE_DESCRIPTOR: str(store.detach())}
    # local_world_size is a plain 1, because there may be only one GPU. This looks like several machines to
    # `rendezvous.join`, which then does not choose the loopback interface itself.
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    environment.read_ranking = lambda: Ranking(world_size=OnlyRank(1), local_world_size=1)
    runpy.run_path("ddp_train.py", run_name="__main__")
