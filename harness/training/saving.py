"""Checkpoints written while training goes on, or at once, and the copies of their tensors in the host's memory.

Fresh memory for each copy costs the training thread twice: the system hands it out page by page while it is filled, and
a GPU copies into ordinary (pageable) memory at a fraction of the bus's speed, the thread waiting. A buffer that is kept
has its pages, and can be pinned once: then the GPU fills it by itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.common.units import GIB


class SyncWriter:
    """Does the work when it is asked to."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def check(self) -> None:
        """Raise what work that was submitted earlier has raised since."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when nothing is left to do; raises like `check`."""


class AsyncWriter(SyncWriter):
    """Does one piece of work at a time in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Begin the work; returns once any earlier one has ended, and raises if that failed."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True, name="checkpoint-writer")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)
        self.check()


# Each tensor begins at a multiple of so many bytes: of a cache line, and so of every element's size.
ALIGNMENT = 64


class HostCopies:
    """CPU copies of nested dicts with tensors in them; rank 0's alone. Holds as many bytes as these take (for AdamW
    three times the weights; pinned, torch rounds that up to a power of two), from the first copy to the end of the
    process, or with `keep=False` until the copy is dropped."""

    def __init__(self, device: torch.device, *, keep: bool) -> None:
        self._device = device
        self._keep = keep
        self._buffer: Tensor | None = None
        self._copied: Any = None  # the event after the copies of the last call

    def copy(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the dicts with a copy on the CPU in each tensor's place: contiguous, each with a storage of its own.

        On a GPU the copies are only enqueued: they precede all later work of the current stream, such as the next step,
        and can be read after `wait`. The copies of an earlier call are overwritten.
        """
        tensors: list[Tensor] = []
        _replaced(tree, tensors.append)
        places = iter(self._places(tensors))
        copied = _replaced(tree, lambda tensor: next(places).copy_(tensor, non_blocking=True))
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event(blocking=True)  # whoever waits for it sleeps
            self._copied.record()
        return copied

    def wait(self) -> None:
        """Return when the last `copy` has been done; for the thread that reads it."""
        if self._copied is not None:
            self._copied.synchronize()

    def _places(self, tensors: list[Tensor]) -> list[Tensor]:
        """Room for each tensor, in one buffer. torch.save writes whole storages: each place is a storage of its own."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        memory = self._room(end).numpy()
        return [
            torch.from_numpy(memory[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

    def _room(self, size: int) -> Tensor:
        """A buffer of at least so many bytes."""
        if self._buffer is not None and self._buffer.nbytes >= size:
            return self._buffer
        self._buffer = buffer = None  # before there is another
        if self._device.type == "cuda" and self._keep:
            try:
                buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                print(
                    f"note: {size / GIB:.2f} GiB of the host's memory cannot be pinned ({reason}): training pauses "
                    "longer for each checkpoint; raise the limit on locked memory (ulimit -l) or the job's memory",
                    file=sys.stderr,
                    flush=True,
                )
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8)
        if self._keep:
            self._buffer = buffer
        return buffer


def _replaced(tree: dict[str, Any], function: Any) -> dict[str, Any]:
    """Replace each tensor of nested dicts by `function` of it, in order; returns new dicts."""
    return {
        key: _replaced(value, function) if isinstance(value, dict) else function(value) for key, value in tree.items()
    }
