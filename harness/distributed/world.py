"""Nested dicts, lists and tuples, as states of optimizers and the like are made of."""

from __future__ import annotations

import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

from harness.common.device import choose_device
from harness.common.errors import PeerError, RunError, UserError
from harness.common.launcher import started_by_torchrun
from harness.distributed.environment import place
from harness.distributed.rendezvous import agree_on_restart_id
from harness.distributed.watchdog import NoWatchdog, Watchdog

Leaf = TypeVar("Leaf")


def replace_leaves(tree: Any, kind: type[Leaf], function: Callable[[Leaf], Any]) -> Any:
    """The same tree with `function` of every leaf that is a `kind` in its place; in the order of the tree."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, dict):
        return {key: replace_leaves(value, kind, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(replace_leaves(value, kind, function) for value in tree)
    return tree


T = TypeVar("T")

# How gloo and nccl say that the process at the other end has closed its connection.
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
CONTROL_TIMEOUT = timedelta(days=7)
DEFAULT_TIMEOUT_SECONDS = 600.0
TIMEOUT_VARIABLE = "COLLECTIVE_TIMEOUT_SECONDS"
# The watch, which can say more and knows what may take long, comes first: these are for what it does not look at.
BACKSTOP_SECONDS = 3600.0
WAITING_SECONDS = 15.0  # without a word


@dataclass(frozen=True)
class RankResult:
    """What one rank's part of some shared work came to."""

    value: Any = None
    error: str | None = None


@dataclass(frozen=True)
class TensorSlot:
    """Stands for a tensor that travels by itself."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@contextmanager
def leaving_with_peers() -> Iterator[None]:
    """Turn the error of an exchange whose other side is gone into PeerError: the rank that failed has the reason."""
    try:
        yield
    except RuntimeError as error:
        if TIMED_OUT_TEXT in str(error):
            raise RunError("another rank did not come to an exchange in time, and none is known to be stuck") from None
        if not any(text in str(error) for text in PEER_GONE_TEXTS):
            raise
        raise PeerError("the connection to another rank is gone") from None


class PendingMax:
    """Questions to all ranks that are answered while they compute."""

    def __init__(self, ballot: torch.Tensor, pending: Any) -> None:
        self._ballot = ballot
        self._pending = pending

    def result(self) -> list[int]:
        """Of each number the largest that any rank voted; waits for the ranks that have not voted yet."""
        if self._pending is not None:
            with leaving_with_peers():
                self._pending.wait()
            self._pending = None
        return self._ballot.tolist()


@dataclass(frozen=True)
class World:
    """This process among the others. Without torchrun the world is one process and every wait returns at once."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    device: torch.device
    watchdog: Watchdog = field(default_factory=NoWatchdog)
    control: Any = None

    @classmethod
    def start(cls) -> World:
        """Join the world that torchrun's environment variables describe and choose this process's device.

        Raises UserError if there is none for it, or the variables are impossible.
        """
        here = place()
        rank, local_rank, size, local_size = here.rank, here.local_rank, here.world_size, here.local_world_size
        device = choose_device(local_rank, local_size)
        if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
        if size == 1:
            return cls(rank, local_rank, size, local_size, device)
        if size == local_size:
            _listen_on_loopback()
        timeout = _timeout_seconds()
        # torch.accelerator reports cuda on any CUDA build, GPU or not: the backend follows the device we chose.
        backend = "nccl" if device.type == "cuda" else "gloo"
        patience = timedelta(seconds=timeout + BACKSTOP_SECONDS)
        # The store is in torchrun's process, which may be killed meanwhile.
        with leaving_with_peers(), _long_wait_told(rank, size):
            store, _, _ = next(rendezvous("env://", timeout=patience))
            life = agree_on_restart_id(store, rank, size, patience.total_seconds())
        with _explained_addresses():
            dist.init_process_group(
                backend,
                store=PrefixStore(life, store),
                rank=rank,
                world_size=size,
                timeout=patience,
                device_id=device if device.type == "cuda" else None,
            )
        with _explained_addresses():
            control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        world = cls(rank, local_rank, size, local_size, device, Watchdog(rank, timeout), control)
        world.watchdog.start(PrefixStore(life, _own_connection()), size, world.barrier)
        return world

    def stop(self) -> None:
        """Leave the world after every rank has got here."""
        if self.size > 1:
            self.barrier()
            self.watchdog.stop()
            dist.destroy_process_group()

    @property
    def device_name(self) -> str:
        """As its driver calls it, or the processor's architecture."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{platform.machine()} CPU"

    @property
    def is_one_machine(self) -> bool:
        return self.size == self.local_size

    @property
    def is_main(self) -> bool:
        """Does the job's work: validation, checkpoints, charts, progress."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Does the node's work: directories, downloads."""
        return self.local_rank == 0

    def barrier(self) -> None:
        """Wait for all ranks, however long they take."""
        self.gather(None)

    def gather(self, value: T) -> list[T]:
        """Every rank's `value` (small, picklable), by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with leaving_with_peers():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def all_true(self, value: bool) -> bool:
        """True if it is true on every rank."""
        return all(self.gather(value))

    def async_max(self, *numbers: int) -> PendingMax:
        """Start finding the largest of each of `numbers` on any rank without waiting for it."""
        ballot = torch.tensor(numbers)
        pending = None
        if self.size > 1:
            pending = dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
        return PendingMax(ballot, pending)

    def collective_error(self, message: str) -> RunError:
        """The error of a conclusion that every rank has come to, so that one of them tells it."""
        return RunError(message) if self.is_main else PeerError(message)

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 while the others wait; its (small) result on every rank.

        An error of rank 0 is raised there; the others raise PeerError, so that the whole job ends.
        """
        return self._on_some(work, mine=self.is_main)[0]

    def broadcast(self, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0; its result (dicts and lists of tensors and plain values) on every rank, on the CPU.

        An error of rank 0 is raised as `on_rank0` has it.
        """
        tensors: list[torch.Tensor] = []

        def take_out(tensor: torch.Tensor) -> TensorSlot:
            tensors.append(tensor.cpu())
            return TensorSlot(len(tensors) - 1, tuple(tensor.shape), tensor.dtype)

        def put_back(hole: TensorSlot) -> torch.Tensor:
            tensor = tensors[hole.index] if self.is_main else torch.empty(hole.shape, dtype=hole.dtype)
            if self.size > 1:
                with leaving_with_peers():
                    dist.broadcast(tensor.contiguous().reshape(-1).view(torch.uint8), src=0, group=self.control)
            return tensor

        outline = self.on_rank0(lambda: replace_leaves(work(), torch.Tensor, take_out))
        return replace_leaves(outline, TensorSlot, put_back)

    def on_each_node(self, work: Callable[[], T]) -> T:
        """Run `work` on each node's first process while the others wait; the node's own result on every rank."""
        outcomes = self._on_some(work, mine=self.is_local_main)
        return outcomes[self.rank - self.local_rank]

    def _on_some(self, work: Callable[[], T], *, mine: bool) -> list[Any]:
        outcome, raised = RankResult(), None
        if mine:
            try:
                outcome = RankResult(value=work())
            except (UserError, RunError) as error:
                outcome, raised = RankResult(error=str(error)), error
            except Exception as error:
                self.gather(RankResult(error=repr(error)))
                raise
        outcomes = self.gather(outcome)
        if raised is not None:
            raise raised
        for other in outcomes:
            if other.error is not None:
                raise PeerError(other.error)
        return [each.value for each in outcomes]


def _own_connection() -> TCPStore:
    """The store at which the ranks met, over a connection that only the watch's threads use."""
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)


@contextmanager
def _long_wait_told(rank: int, size: int) -> Iterator[None]:
    """Say for whom this rank waits, if that takes long: variables that another job has left would keep it for hours."""
    text = (
        f"rank {rank} waits for the other {size - 1} of {size} at {os.environ['MASTER_ADDR']}:"
        f"{os.environ['MASTER_PORT']}; for a single process: unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE"
    )
    timer = threading.Timer(WAITING_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    if not started_by_torchrun():  # which starts all ranks
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _listen_on_loopback() -> None:
    """There is nothing to hear from other machines, and so nothing for them to reach. What the user has set stays."""
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ():
        os.environ.setdefault(variable, min(loopback))


@contextmanager
def _explained_addresses() -> Iterator[None]:
    """A machine's name may lead to an address that only itself can use, such as Debian's 127.0.1.1."""
    try:
        yield
    except RuntimeError as error:
        if NO_FULL_MESH_TEXT not in str(error):
            raise
        raise RunError(
            f"a rank cannot be reached at the address that {socket.gethostname()} or another machine gave for itself; "
            "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) on every machine to the interface that they share, as eth0"
        ) from None


def _timeout_seconds() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= CONTROL_TIMEOUT.total_seconds():
        raise UserError(
            f"{TIMEOUT_VARIABLE}: {text!r} is not a number of seconds; unset it for {DEFAULT_TIMEOUT_SECONDS:g}"
        )
    return seconds
