"""Background or synchronous writing of checkpoints, and copies of tensors in host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from harness.common.errors import EXIT, RunError
from harness.common.memory import MORE_MEMORY
from harness.common.messages import GIB, tell
from harness.distributed.world import World, replace_tensors
from harness.model.weights import checkpoint_views
from harness.training.step import OptimizerStep
from harness.training.zero1 import empty_state


class Writer:
    """Runs one task at a time: in the calling thread, or with `in_background` in a thread of its own."""

    def __init__(self, *, in_background: bool) -> None:
        self._in_background = in_background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Wait for the previous task to end, then run `work`, or with `in_background` only start `work`. If the
        previous task has failed and its error was not raised yet, raise that error instead."""
        self.wait()
        if not self._in_background:
            work()
            return
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True, name="checkpoint-writer")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise the error of a background task that has failed, if there is one. Each error is raised once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the background task has ended, for at most `timeout` seconds (None: as long as it takes). If it
        has failed, raise its error."""
        if self._thread is not None:
            self._thread.join(timeout)
            self.check()


# Offsets in the buffer are multiples of this many bytes: of a cache line, and so of every element size.
ALIGNMENT = 64


class HostCopies:
    """CPU copies of nested dicts of tensors, used on rank 0 only.

    All copies of a call of `copy` share one buffer. For a checkpoint with AdamW, this buffer has three times the size
    of the weights. With `keep`, the buffer stays allocated between calls. Without `keep`, it is freed with the copies.
    """

    def __init__(self, device: torch.device, *, keep: bool) -> None:
        self._device = device
        self._keep = keep
        # A kept buffer is mapped already and can be pinned. New memory would be mapped page by page while it is filled.
        # A GPU copies into ordinary (pageable) memory at a fraction of the bus's speed, while the training thread
        # waits.
        self._buffer: Tensor | None = None
        self._copied: Any = None  # CUDA event of the last `record`

    def copy(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the dicts with every tensor replaced by a contiguous CPU copy. A tensor on the device "meta" becomes
        uninitialized memory for the caller to fill.

        Copies from a GPU can be read after `record` and `wait`, and show the tensors as of this call. With `keep`, a
        later call may overwrite the copies of an earlier one. Raises RunError if memory is short.
        """
        tensors: list[Tensor] = []
        replace_tensors(tree, tensors.append)
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        memory, starts = self._room(sum(sizes)).numpy(), accumulate(sizes, initial=0)

        def copied(tensor: Tensor) -> Tensor:
            start = next(starts)
            # with its own storage, because torch.save would otherwise write the whole buffer for each tensor
            place = torch.from_numpy(memory[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
            return place if tensor.is_meta else place.copy_(tensor, non_blocking=True)

        copies: dict[str, Any] = replace_tensors(tree, copied)
        return copies

    def record(self) -> None:
        """Record that all copies are enqueued, so that `wait` waits for them."""
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of polling
            self._copied.record()

    def wait(self) -> None:
        """Wait until the GPU has finished the copies."""
        if self._copied is not None:
            self._copied.synchronize()

    def _room(self, size: int) -> Tensor:
        """Return a buffer of at least `size` bytes: the kept one if it is large enough, or a new one. Raises RunError
        if there is not enough memory."""
        if self._buffer is not None and self._buffer.nbytes >= size:
            return self._buffer
        self._buffer = buffer = None  # frees the old buffer before a new one is allocated
        if self._device.type == "cuda" and self._keep:
            try:
                # torch rounds pinned memory up to a power of two.
                buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                tell(
                    f"note: {size / GIB:.2f} GiB of the host's memory cannot be pinned ({reason}): training pauses "
                    "longer for each checkpoint; give the process more of the host's memory"
                )
        if buffer is None:
            try:
                buffer = torch.empty(size, dtype=torch.uint8)
            except RuntimeError:
                raise RunError(
                    f"out of memory: the copy of a checkpoint needs {size / GIB:.2f} GiB of host memory; {MORE_MEMORY}"
                    f", and {EXIT.again} to continue"
                ) from None
        if self._keep:
            self._buffer = buffer
        return buffer


def copy_state(step: OptimizerStep, world: World, copies: HostCopies) -> dict[str, Any]:
    """Return {"weights": ..., "optimizer": ...}. On rank 0, both are copies of tensors by their names in checkpoints,
    on other ranks empty dicts. On a GPU, the copies can be read after `copies.wait()`. Collective."""
    optimizer = step.optimizer
    copied: dict[str, Any] = {"weights": {}, "optimizer": {}}

    def copy_own() -> None:  # fills `copied`, because `on_rank0` would send a result to all ranks
        weights = checkpoint_views(step.bare_model.state_dict(), step.bare_model.config)
        state = empty_state(optimizer.state_shapes(), "meta")
        copied.update(copies.copy({"weights": weights, "optimizer": state}))  # only allocates the state

    world.on_rank0(copy_own)
    copied["optimizer"] = optimizer.named_state(world, into=copied["optimizer"])
    if world.is_main:
        copies.record()
    return copied
