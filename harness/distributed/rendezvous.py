"""Rendezvous of exactly the ranks that were started together, and translation of errors on the connections between
them.

torchrun may start a job's ranks several times, with one store for all starts. Entries of an earlier start are ignored.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

from harness.common.errors import EXIT, TELLING_SECONDS, PeerError, RunError, UserError, end_for_good, tell_soon
from harness.common.messages import tell
from harness.common.processes import is_launched
from harness.distributed.environment import STORE_DESCRIPTOR, Ranking
from harness.distributed.watchdog import LONGEST_TIMEOUT_SECONDS

POLL_SECONDS = 0.02
CONTROL_TIMEOUT = timedelta(seconds=LONGEST_TIMEOUT_SECONDS)  # long enough for any work of another rank
# The timeout of collectives is this much longer than the watchdog's, so that the watchdog reports a fault first. Its
# message says more, and it knows which work may take long. The longer timeout is for collectives that the watchdog does
# not guard.
BACKSTOP_SECONDS = 3600.0
STARTING_SECONDS = 60.0  # in which the ranks of a launcher start, or torchrun notices a failure and starts them again
WAITING_SECONDS = 15.0  # after this time, a rank prints that it waits for other ranks
# Texts of errors that mean that the process at the other end has closed its connection or cannot be reached.
PEER_GONE_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection timed out",
    "Connection was likely closed",  # of torchrun's store: "Failed to recv, got 0 bytes. ..."
    "Broken pipe",
    "No route to host",
    "Host is unreachable",
    "Network is unreachable",
    "remote process exited",
)
TIMED_OUT_TEXT = "Timed out waiting"
NO_INTERFACE_TEXT = "Unable to find address for: "  # gloo's error for an interface that is not there; its name follows
NO_FULL_MESH_TEXT = "connectFullMesh failed"  # gloo's error if a rank could not be reached at the address that it gave


def join(here: Ranking, device: torch.device, timeout_seconds: float) -> tuple[Any, Any]:
    """Connect this rank to all other ranks. Return a process group on the CPU, and a store for the watchdog.
    Collective.

    Also initializes torch.distributed's default process group, for tensors on the ranks' devices. `timeout_seconds` is
    the watchdog's. Raises RunError or PeerError if a rank does not join or cannot be reached. Ends this process if the
    ranks have joined, but do not connect in time. Raises UserError if GLOO_SOCKET_IFNAME names no usable interface.
    """
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if here.world_size == here.local_world_size and loopback:  # one machine; the user's settings have precedence
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, min(loopback))
    # Chosen by the device, because torch.accelerator reports cuda on any CUDA build, even without a GPU.
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds + BACKSTOP_SECONDS)
    # NCCL's own monitor would otherwise abort after 480 s, before the watchdog, with pages of C++ stack frames.
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(timeout.total_seconds())))
    # torchrun starts all ranks at the same time, after its agents on all machines have met. So a rank that does not
    # come soon has been refused or lost. If it is on another machine, the launcher there cannot end the ranks here, so
    # they wait less. A single launcher ends all ranks itself. Without a launcher, people may start ranks by hand.
    has_other_launchers = here.world_size != here.local_world_size and is_launched()
    patience = timedelta(seconds=timeout_seconds + STARTING_SECONDS) if has_other_launchers else timeout
    text = (
        f"rank {here.rank} of {here.world_size} waits for the other {here.world_size - 1} at "
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    )
    if not is_launched():
        text += "; for a single process: unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE"
    timer = threading.Timer(WAITING_SECONDS, tell, (text,))
    timer.daemon = True
    if not is_launched() or (has_other_launchers and here.local_rank == 0):
        timer.start()
    with connection_errors_as_peer_errors():  # the store is in torchrun's process, which may be killed meanwhile
        try:
            store = _open_store(patience)
            restart_id = agree_on_restart_id(store, here.rank, here.world_size, patience.total_seconds())
        except RunError as error:
            if has_other_launchers:  # torchrun must not start the ranks of this machine again
                end_for_good(error.exit_status)
            raise
        finally:
            timer.cancel()
        # Nothing else ends a rank that NCCL cannot connect, because the watchdog needs the group that is made here.
        late = threading.Timer(timeout_seconds + STARTING_SECONDS, _give_up_connecting, (here.local_rank,))
        late.daemon = True
        late.start()
        try:
            dist.init_process_group(
                backend,
                store=PrefixStore(restart_id, store),
                rank=here.rank,
                world_size=here.world_size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
            control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        finally:
            late.cancel()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # The watchdog's threads need a connection of their own.
        return control, PrefixStore(restart_id, TCPStore(address, port, is_master=False, wait_for_workers=False))


def _give_up_connecting(local_rank: int) -> None:
    """End this process because the ranks have not connected to each other. One rank per machine prints the reason."""
    if local_rank == 0:
        text = "the ranks met, but have not connected; look for an error message of another machine (on GPUs, "
        tell_soon(f"{text}NCCL_DEBUG=INFO shows why); {EXIT.again} to continue")
    else:
        time.sleep(TELLING_SECONDS)
    os._exit(1)


def _open_store(timeout: timedelta) -> Any:
    """Return the store at MASTER_ADDR and MASTER_PORT. Rank 0 opens the store, unless torchrun has opened it."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if STORE_DESCRIPTOR in os.environ:
        socket_number = int(os.environ[STORE_DESCRIPTOR])
        return TCPStore(address, int(port), None, True, timeout, wait_for_workers=False, master_listen_fd=socket_number)
    try:
        return next(rendezvous("env://", timeout=timeout))[0]
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise RunError(f"MASTER_PORT {port}: taken by another process; give another port") from None
        if "timed out" in str(error):
            raise RunError(f"rank 0 does not answer at MASTER_ADDR {address}, MASTER_PORT {port}; check both") from None
        if "Timed out" in str(error):  # the DistStoreError of rank 0
            raise RunError("not all ranks have joined in time; look for an error message of the others") from None
        raise


def agree_on_restart_id(store: Any, rank: int, size: int, timeout_seconds: float) -> str:
    """Return a new id of this start of the job, the same on all `size` ranks. Raises RunError if a rank has not joined
    in time. Collective."""
    deadline = time.monotonic() + timeout_seconds

    def wait_a_moment(absent: int) -> None:
        if time.monotonic() > deadline:
            raise RunError(f"rank {absent} has not answered in time; look for an error of that rank or its machine")
        time.sleep(POLL_SECONDS)

    if rank != 0:
        # The name is random, so that no answer to a request of an earlier start is found under it.
        request = secrets.token_hex(8)
        store.set(f"requests/{rank}", request)
        while not store.check([f"answers/{request}"]):
            wait_a_moment(0)
        restart_id = store.get(f"answers/{request}").decode()
        store.set(f"{restart_id}/received/{rank}", "")
        return restart_id
    # TORCHELASTIC_RESTART_COUNT cannot distinguish the starts, because every node counts its own.
    restart_id = secrets.token_hex(8)
    for other in range(1, size):
        while not store.check([f"{restart_id}/received/{other}"]):
            if store.check([f"requests/{other}"]):  # if this request is of an earlier start, a newer one follows
                store.set(f"answers/{store.get(f'requests/{other}').decode()}", restart_id)
            wait_a_moment(other)
    return restart_id


# Errors of gloo and nccl about failed connections ------------------------------------------------------------------


@contextmanager
def connection_errors_as_peer_errors() -> Iterator[None]:
    """Context manager that translates errors of gloo and nccl.

    - PeerError: the connection to another rank is gone.
    - RunError: the body timed out, or a rank could not be reached at its address.
    - UserError: GLOO_SOCKET_IFNAME names an interface that this machine lacks.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if NO_INTERFACE_TEXT in text:
            given = f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME')}"
            raise UserError(
                f"{given}: no such interface, or it has no address; `ip -brief address` lists them"
            ) from None
        if NO_FULL_MESH_TEXT in text:  # a host name that resolves to a loopback address, such as Debian's 127.0.1.1
            raise RunError(
                f"a rank cannot be reached at the address that {socket.gethostname()} or another machine gave for "
                "itself; set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) on every machine to the interface that they "
                "share, such as eth0"
            ) from None
        # RunError, because no rank is known to have failed.
        if TIMED_OUT_TEXT in text:
            raise RunError(
                f"timed out waiting for another rank; no rank was found stuck; {EXIT.again} to continue"
            ) from None
        if not any(each in text for each in PEER_GONE_TEXTS):
            raise
        raise PeerError("the connection to another rank is gone") from None
