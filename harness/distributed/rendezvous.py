"""Rendezvous of the ranks that were started together, and of no others, and errors of the connections between them.

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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

from harness.common.errors import PeerError, RunError
from harness.common.processes import is_launched
from harness.distributed.environment import STORE_DESCRIPTOR, Ranking
from harness.distributed.watchdog import LONGEST_TIMEOUT_SECONDS

POLL_SECONDS = 0.02
CONTROL_TIMEOUT = timedelta(seconds=LONGEST_TIMEOUT_SECONDS)
# The watchdog, which can say more and knows what may take long, comes first: these are for what it does not look at.
BACKSTOP_SECONDS = 3600.0
WAITING_SECONDS = 15.0  # without a word
# The process at the other end has closed its connection.
PEER_GONE_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection timed out",
    "Broken pipe",
    "No route to host",
    "Host is unreachable",
    "Network is unreachable",
    "remote process exited",
)
TIMED_OUT_TEXT = "Timed out waiting"
NO_FULL_MESH_TEXT = "connectFullMesh failed"  # gloo: a rank could not be reached at the address it gave


def join(here: Ranking, device: torch.device, timeout_seconds: float) -> tuple[Any, Any]:
    """Find the other ranks and connect to all of them; returns when all are there.

    torch.distributed itself keeps the group of gradients, on the ranks' devices. Returned are a group on the CPU, whose
    waits may be as long as any work of another rank, and a store over a connection of its own, for the watchdog.
    Raises RunError or PeerError if a rank does not come, or cannot be reached.
    """
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if here.world_size == here.local_world_size and loopback:  # all on this machine; the user's settings are kept
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, min(loopback))
    # torch.accelerator reports cuda on any CUDA build, GPU or not: the backend follows the device we chose.
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds + BACKSTOP_SECONDS)
    with leaving_with_peers():  # the store is in torchrun's process, which may be killed meanwhile
        with _long_wait_told(here):
            store = _open_store(timeout)
            restart_id = agree_on_restart_id(store, here.rank, here.world_size, timeout.total_seconds())
        dist.init_process_group(
            backend,
            store=PrefixStore(restart_id, store),
            rank=here.rank,
            world_size=here.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    return control, PrefixStore(restart_id, TCPStore(*_address(), is_master=False, wait_for_workers=False))


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _open_store(timeout: timedelta) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT, which rank 0 may have to open: of ranks that `run_ranks` has started,
    behind a socket that was open before. Raises RunError if the port is taken."""
    if STORE_DESCRIPTOR in os.environ:
        socket_number = int(os.environ[STORE_DESCRIPTOR])
        return TCPStore(*_address(), None, True, timeout, wait_for_workers=False, master_listen_fd=socket_number)
    try:
        return next(rendezvous("env://", timeout=timeout))[0]
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise RunError(
            f"MASTER_PORT {os.environ['MASTER_PORT']}: taken by another process; give another port"
        ) from None


def agree_on_restart_id(store: Any, rank: int, size: int, timeout_seconds: float) -> str:
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


def _hand_out_restart_id(store: Any, size: int, deadline: float) -> str:
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


def _await(store: Any, key: str, rank: int, deadline: float) -> None:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise _absence(rank)
        time.sleep(POLL_SECONDS)


def _absence(rank: int) -> RunError:
    return RunError(f"rank {rank} has not joined the others in time; look for its own error, or its machine's")


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


# Errors of gloo and nccl about failed connections ------------------------------------------------------------------


@contextmanager
def leaving_with_peers() -> Iterator[None]:
    """Turn the error of an exchange whose other side is gone into PeerError: the rank that failed has the reason. Or
    into RunError, where none is known to have failed, or could be reached at all."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if NO_FULL_MESH_TEXT in text:  # a name that leads to an address of its own machine, such as Debian's 127.0.1.1
            raise RunError(
                f"a rank cannot be reached at the address that {socket.gethostname()} or another machine gave for "
                "itself; set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) on every machine to the interface that they "
                "share, as eth0"
            ) from None
        if TIMED_OUT_TEXT in text:
            raise RunError("timed out waiting for another rank in an exchange; no rank was found stuck") from None
        if not any(each in text for each in PEER_GONE_TEXTS):
            raise
        raise PeerError("the connection to another rank is gone") from None
