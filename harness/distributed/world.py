"""This process and the other ranks of its job: its rank and device, and the operations that all ranks do together."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness.common.device import choose_device, device_name
from harness.common.errors import EXIT, PeerError, RunError, UserError
from harness.common.libraries import usable_cores
from harness.common.memory import give_back_under_a_limit, taken_by_others
from harness.common.messages import tell
from harness.distributed import rendezvous
from harness.distributed.environment import read_ranking
from harness.distributed.rendezvous import connection_errors_as_peer_errors
from harness.distributed.watchdog import FIRST_EXCHANGE, Place, Watchdog, collective_timeout_seconds, device_progress

T = TypeVar("T")

LEAVING_SECONDS = 30.0


@dataclass(frozen=True)
class World:
    """This process among all ranks. Every rank must call the methods and functions marked "Collective". Without a
    launcher's variables the world is one process and every wait returns at once."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    device: torch.device
    watchdog: Watchdog = field(default_factory=Watchdog)
    control: Any = None  # process group on the CPU, for all but the work on the device; None for a single process
    taken: str | None = None  # remark on other processes' GPU memory, made before NCCL allocated its buffers

    @classmethod
    def join(cls, is_stopping: Callable[[], bool] = lambda: False) -> World:
        """Choose this process's device, and join the world that the launcher's environment variables describe.
        Collective.

        `is_stopping` returns True if this rank has a reason to stop. The watchdog's threads call it. Raises UserError
        if a variable is wrong or this process has no usable device. If the ranks do not connect, raises RunError or
        PeerError, or ends this process.
        """
        here, timeout = read_ranking(), collective_timeout_seconds()
        device = choose_device(here.local_rank, here.local_world_size)
        if device.type == "cpu":
            give_back_under_a_limit()
        if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it
            torch.set_num_threads(max(1, usable_cores() // here.local_world_size))
        taken = taken_by_others(device)
        if here.world_size == 1:
            return cls(*here, device, taken=taken)
        control, heartbeats = rendezvous.join(here, device, timeout)
        watchdog = Watchdog(here.rank, timeout, is_stopping, device_progress(device))
        world = cls(*here, device, watchdog, control, taken)
        watchdog.start(heartbeats, world.size, world.barrier)
        return world

    def leave(self) -> None:
        """Wait for all ranks, and close the connections to them. Collective. This must be the last thing that a process
        does: if closing takes too long, the process ends here, with exit status 0."""
        if self.size > 1:
            self.barrier()
            self.watchdog.stop()
            timer = threading.Timer(LEAVING_SECONDS, _end_without_leaving, (self.rank,))
            timer.daemon = True
            timer.start()
            dist.destroy_process_group()
            timer.cancel()

    @property
    def device_name(self) -> str:
        """The device's name from its driver, or for the CPU the processor's architecture."""
        return device_name(self.device)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which alone writes checkpoints and charts, and prints progress."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks, however long they take. Collective."""
        self.gather(None)

    def gather(self, value: T) -> list[T]:
        """Return the list of all ranks' `value`, in the order of the ranks, on every rank. Values must be small and
        picklable. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with connection_errors_as_peer_errors():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def exchange_once(self, sizes: Sequence[int]) -> None:
        """All-reduce and broadcast one tensor of each of the given sizes (bytes) on the device. Collective.

        On GPUs, NCCL has then allocated its buffers for these sizes.
        """
        if self.size > 1:
            with connection_errors_as_peer_errors(), self.watchdog.guard(FIRST_EXCHANGE):
                # NCCL allocates buffers when it first uses an algorithm, which it chooses by operation and size.
                for size in sizes:
                    numbers = torch.zeros(size // 4, device=self.device)
                    dist.all_reduce(numbers)
                    dist.broadcast(numbers, src=0)
                    numbers[0].item()  # waits for the device

    def all_reduce_seconds(self, size: int, least: float) -> float:
        """Return the seconds of an all-reduce of `size` bytes between the ranks' devices, on the slowest rank. About
        as many all-reduces as fit into `least` seconds are averaged, at most 2,001. Needs at least two ranks.
        Collective."""
        numbers = torch.zeros(size // 4, device=self.device)

        def seconds_of(count: int) -> float:
            self.barrier()
            began = time.perf_counter()
            with connection_errors_as_peer_errors(), self.watchdog.guard(Place(0, "machine")):
                for _ in range(count):
                    dist.all_reduce(numbers)
                numbers[0].item()  # waits for the device
            return max(self.gather(time.perf_counter() - began))

        seconds_of(1)  # connects the ranks
        # Several, because the ranks leave a barrier up to a millisecond apart.
        count = 1 + min(2000, int(3 * least / seconds_of(3)))
        return seconds_of(count) / count

    def async_max(self, *numbers: int) -> Callable[[], list[int]]:
        """Start an asynchronous all-reduce (maximum) of `numbers` on the CPU. Returns a function that waits for the
        maxima and returns them. Every rank must pass equally many numbers and call the returned function. Collective.
        """
        largest = torch.tensor(numbers)
        pending = None
        if self.size > 1:
            pending = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.control, async_op=True)

        def result() -> list[int]:
            if pending is not None:
                with connection_errors_as_peer_errors():
                    pending.wait()
            return largest.tolist()

        return result

    def collective_error(self, message: str) -> RunError:
        """Return the error to raise when every rank has found the same failure: RunError on rank 0, which prints it,
        and PeerError on the others."""
        return RunError(message) if self.is_main else _peer_error(message)

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 while the others wait. Returns its result, which must be small and picklable, on every
        rank. Collective.

        An error in `work` is raised on rank 0, and PeerError on the other ranks.
        """
        return self._on_some(work, mine=self.is_main)[0]

    def broadcast(self, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0, and return its result on every rank, with all tensors on the CPU. Collective.

        Tensors are found in nested dicts, lists and tuples. All other parts of the result must be small and picklable.
        An error of rank 0 is raised as in `on_rank0`.
        """
        tensors: list[torch.Tensor] = []

        def take_out(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor.cpu())
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        outline = self.on_rank0(lambda: replace_tensors(work(), take_out))
        own = iter(tensors)  # in the order of the tree; empty except on rank 0

        def send_or_receive(shape: torch.Tensor) -> torch.Tensor:
            tensor = next(own) if self.is_main else torch.empty(shape.shape, dtype=shape.dtype)
            if self.size > 1:
                with connection_errors_as_peer_errors():  # a tensor that is not contiguous is sent as a copy
                    dist.broadcast(tensor.contiguous().reshape(-1).view(torch.uint8), src=0, group=self.control)
            return tensor

        return replace_tensors(outline, send_or_receive)

    def on_each_node(self, work: Callable[[], T]) -> T:
        """Run `work` on the first process of each node, and return its result on every rank of that node. Collective.

        The result must be small and picklable. An error in `work` is raised on the ranks where it occurs, and PeerError
        on the other ranks.
        """
        return self._on_some(work, mine=self.local_rank == 0)[self.rank - self.local_rank]

    def _on_some(self, work: Callable[[], T], *, mine: bool) -> list[Any]:
        """Run `work` on the ranks where `mine` is true, and return the results by rank, with None for the other ranks.
        Collective."""
        value, raised = None, None
        if mine:
            try:
                value = work()
            except (UserError, RunError) as error:
                raised = error
            except Exception as error:
                self.gather((None, repr(error)))
                raise
        results = self.gather((value, None if raised is None else str(raised)))
        if raised is not None:
            raise raised
        for _, reason in results:
            if reason is not None:
                raise _peer_error(reason)
        return [each for each, _ in results]


def _peer_error(reason: str) -> PeerError:
    """Return the error for a rank that knows why another one fails, and record `reason` for the watchdog's message."""
    EXIT.peer_reason = reason
    return PeerError(reason)


def say(world: World, text: str) -> None:
    """Print a line on rank 0 only."""
    if world.is_main:
        print(text, flush=True)


def replace_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return a copy of `tree` (nested dicts, lists and tuples) with `function(tensor)` in place of each tensor. The
    function is called for the tensors in their order in the tree."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: replace_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(replace_tensors(value, function) for value in tree)
    return tree


def _end_without_leaving(rank: int) -> None:
    """End this process with status 0 although its connections are open. A machine that is paid by the hour must not
    wait for a device or a network that no longer answers."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    with suppress(OSError):
        text = f"note: rank {rank} could not close its connections within {LEAVING_SECONDS:g} s, and leaves them open"
        tell(f"{text}; all results have been written")
    os._exit(0)
