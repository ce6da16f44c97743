"""Rendezvous of the ranks that were started together, and of no others.

torchrun may start a job's ranks several times (--max-restarts), and keeps one store for all these starts: stale entries
of an earlier start, such as addresses at which no process listens any more, would be taken for today's.
TORCHELASTIC_RESTART_COUNT cannot distinguish the starts, because every node counts its own. So rank 0 makes up an id
for each start; a rank asks for it under a random name of its own, and so can get no answer that was meant for another.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

from harness.common.errors import RunError
from harness.common.processes import is_launched
from harness.distributed.connection_errors import explained_addresses, leaving_with_peers
from harness.distributed.environment import STORE_DESCRIPTOR, Ranking
from harness.distributed.watchdog import LONGEST_TIMEOUT_SECONDS

POLL_SECONDS = 0.02
CONTROL_TIMEOUT = timedelta(seconds=LONGEST_TIMEOUT_SECONDS)
# The watchdog, which can say more and knows what may take long, comes first: these are for what it does not look at.
BACKSTOP_SECONDS = 3600.0
WAITING_SECONDS = 15.0  # without a word


@dataclass(frozen=True)
class ProcessGroups:
    """The channels between ranks after the rendezvous. torch.distributed itself keeps the group of gradients, on the
    ranks' devices."""

    control: Any  # a group on the CPU, whose waits may be as long as any work of another rank
    heartbeats: Any  # a store over a connection of its own, for the watchdog's threads


def join(here: Ranking, device: torch.device, timeout_seconds: float) -> ProcessGroups:
    """Find the other ranks and connect to all of them; returns when all are there.

    Raises RunError or PeerError if one does not come, or cannot be reached.
    """
    if here.world_size == here.local_world_size:
        _listen_on_loopback()
    # torch.accelerator reports cuda on any CUDA build, GPU or not: the backend follows the device we chose.
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds + BACKSTOP_SECONDS)
    # The store is in torchrun's process, which may be killed meanwhile.
    with leaving_with_peers(), _long_wait_told(here):
        store = (
            _own_store(timeout) if STORE_DESCRIPTOR in os.environ else next(rendezvous("env://", timeout=timeout))[0]
        )
        restart_id = agree_on_restart_id(store, here.rank, here.world_size, timeout.total_seconds())
    with explained_addresses():
        dist.init_process_group(
            backend,
            store=PrefixStore(restart_id, store),
            rank=here.rank,
            world_size=here.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    with explained_addresses():
        control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    return ProcessGroups(control, PrefixStore(restart_id, _own_connection()))


class Store(Protocol):
    """The methods of torch.distributed's stores that `agree_on_restart_id` uses."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def agree_on_restart_id(store: Store, rank: int, size: int, timeout_seconds: float) -> str:
    """An id that all `size` ranks of this start of the job have, and no other start's. Returns when all are there.

    Raises RunError naming a rank that has not come in time.
    """
    deadline = time.monotonic() + timeout_seconds
    if rank == 0:
        return _hand_out_restart_id(store, size, deadline)
    request = secrets.token_hex(8)
    store.set(f"requests/{rank}", request)
    _await(store, f"answers/{request}", 0, deadline)
    restart_id = store.get(f"answers/{request}").decode()
    store.set(f"{restart_id}/received/{rank}", "")
    return restart_id


def _hand_out_restart_id(store: Store, size: int, deadline: float) -> str:
    """Answer every request there is, old ones too, until each rank says that it has received the id."""
    restart_id, answered = secrets.token_hex(8), set()
    for rank in range(1, size):
        while not store.check([f"{restart_id}/received/{rank}"]):
            _await(store, f"requests/{rank}", rank, deadline)
            request = store.get(f"requests/{rank}").decode()
            if request not in answered:
                store.set(f"answers/{request}", restart_id)
                answered.add(request)
            elif time.monotonic() > deadline:
                raise _absence(rank)
            else:
                time.sleep(POLL_SECONDS)
    return restart_id


def _await(store: Store, key: str, rank: int, deadline: float) -> None:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise _absence(rank)
        time.sleep(POLL_SECONDS)


def _absence(rank: int) -> RunError:
    return RunError(f"rank {rank} has not joined the others in time; look for its own error, or its machine's")


def _listen_on_loopback() -> None:
    """There is nothing to hear from other machines, and so nothing for them to reach. What the user has set stays."""
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ():
        os.environ.setdefault(variable, min(loopback))


def _own_store(timeout: timedelta) -> TCPStore:
    """The store of ranks that `run_ranks` has started: rank 0 keeps it, behind a socket that was open before."""
    address, descriptor = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ[STORE_DESCRIPTOR])
    return TCPStore(*address, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


def _own_connection() -> TCPStore:
    """The store at which the ranks met, over a connection that only the watchdog's threads use."""
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)


@contextmanager
def _long_wait_told(here: Ranking) -> Iterator[None]:
    """Say for whom this rank waits, if that takes long: variables that another job has left would keep it for hours."""
    text = (
        f"rank {here.rank} waits for the other {here.world_size - 1} of {here.world_size} at "
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}; for a single process: "
        "unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE"
    )
    timer = threading.Timer(WAITING_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    if not is_launched():  # which starts all ranks
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
