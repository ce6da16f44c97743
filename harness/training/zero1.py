"""Optimizer state divided among the ranks under `shard_optimizer` (ZeRO, stage 1: Rajbhandari et al.,
arXiv:1910.02054).

Parameters and gradients are whole on every rank. Each parameter is flattened and cut into shards, each owned by one
rank. Only the owner keeps a shard's optimizer state, updates its weights and broadcasts them. Checkpoints hold the
gathered state by parameter name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Shards with fewer elements than this are packed into one broadcast, because each broadcast has a fixed cost.
SMALL_PIECE = 2**18
# Tensors of optimizer state, or their shapes: by parameter name, then by the optimizer's key, such as "exp_avg".
NamedState = dict[str, dict[str, Tensor]]
StateShapes = dict[str, dict[str, torch.Size]]


def empty_state(shapes: StateShapes, device: str = "cpu") -> NamedState:
    """Return an optimizer state of these shapes, of uninitialized fp32 tensors."""
    return {
        name: {key: torch.empty(shape, device=device) for key, shape in state.items()} for name, state in shapes.items()
    }


def check_state(saved: NamedState, shapes: StateShapes) -> None:
    """Raise ValueError if the parameters, keys and shapes in `saved` are not exactly those in `shapes`, or if a tensor
    is not fp32."""
    if saved.keys() != shapes.keys():
        raise ValueError("the names of its parameters are not the model's")
    for name, wanted in shapes.items():
        state = saved[name]
        if state.keys() != wanted.keys():
            raise ValueError(f"{name} has {sorted(state)}, not {sorted(wanted)}")
        for key, shape in wanted.items():
            # Fused kernels would read beyond the end of a smaller tensor.
            if state[key].shape != shape or state[key].dtype != torch.float32:
                raise ValueError(
                    f"{key} of {name} is {state[key].dtype} {list(state[key].shape)}, not fp32 {list(shape)}"
                )


# `StatePartition.cut` begins and ends shards at multiples of this many elements, except for the end of a parameter.
# Kernels process up to 64 elements at once, and the remaining elements at a tensor's end with other instructions, whose
# results may differ in the last bit.
GRAIN = 64
MESSAGE = 2**26  # elements of state per message, and of the buffer that receives a message on the device


@dataclass(frozen=True)
class Shard:
    """Elements `start` to `stop` - 1 of the flattened parameter `name`, and the rank that owns them."""

    name: str
    start: int
    stop: int
    owner: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """Return this shard of `tensor`, which has the parameter's shape, as a flat view."""
        return tensor.detach().view(-1)[self.start : self.stop]


@dataclass(frozen=True)
class StatePartition:
    """Division of an optimizer's state among `size` ranks, of which this process is number `rank`. Without sharding,
    `size` is 1 on every rank.

    If `is_connected` is false, nothing is sent. A single process can then measure its memory as one of `size` ranks
    (ddp_train.py -f).
    """

    rank: int = 0
    size: int = 1
    is_connected: bool = False

    def cut(self, sizes: Mapping[str, int]) -> list[Shard]:
        """Cut parameters of the given sizes (numbers of elements, by name) into shards, and return the shards. Each
        rank owns about the same number of elements."""
        total, before, shards = sum(sizes.values()), 0, []
        for name, size in sizes.items():
            bounds = [total * rank // self.size - before for rank in range(self.size + 1)]
            cuts = [min(max(-(-bound // GRAIN) * GRAIN, 0), size) for bound in bounds]
            shards += [Shard(name, cuts[rank], cuts[rank + 1], rank) for rank in range(self.size)]
            before += size
        return [shard for shard in shards if shard.stop > shard.start]

    def owners(self, costs: Sequence[float]) -> list[int]:
        """Return the rank that does each piece of work. From the most expensive piece on, each goes to the rank with
        the least work so far (Graham 1969)."""
        loads, owners = [0.0] * self.size, [0] * len(costs)
        for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
            owners[index] = loads.index(min(loads))
            loads[owners[index]] += costs[index]
        return owners

    @torch.no_grad()
    def broadcast_shards(self, shards: Iterable[Shard], parameters: Mapping[str, nn.Parameter]) -> None:
        """Overwrite every shard of `parameters` on all ranks with its owner's values. Does nothing if `size` is 1.
        Collective."""
        if self.size == 1:
            return
        views: list[list[Tensor]] = [[] for _ in range(self.size)]
        for shard in shards:
            views[shard.owner].append(shard.of(parameters[shard.name]))
        small = [[view for view in each if view.numel() < SMALL_PIECE] for each in views]
        packed = [torch.cat(each) if each else None for each in small]
        large = [(owner, view) for owner, each in enumerate(views) for view in each if view.numel() >= SMALL_PIECE]
        messages = large + [(owner, pack) for owner, pack in enumerate(packed) if pack is not None]
        if self.is_connected:
            pending = [dist.broadcast(tensor, src=owner, async_op=True) for owner, tensor in messages]
            for work in pending:
                assert work is not None, "broadcast returns None only outside the group"
                work.wait()
        for each, pack in zip(small, packed, strict=True):
            if pack is not None:
                # A private function, because no public one copies all tensors in one kernel.
                torch._foreach_copy_(each, list(pack.split([view.numel() for view in each])))

    def gather(
        self,
        shards: Iterable[Shard],
        own: Mapping[Shard, Mapping[str, Tensor]],
        shapes: StateShapes,
        device: torch.device,
        into: NamedState,
    ) -> None:
        """Copy the state of all `shards` to rank 0, into the tensors of `into`. Collective.

        - `own` has the state of this rank's own shards, on `device`.
        - `into` has tensors in host memory, with the shapes in `shapes`. On ranks other than 0 it is an empty dict.

        On a GPU, the copies may still be running when this method returns.
        """
        for shard in shards:
            if shard.owner == 0 and self.rank != 0:
                continue
            for key, shape in shapes[shard.name].items():
                count = shard.stop - shard.start if shape else 1
                numbers = own[shard][key].detach().reshape(-1) if shard in own else None
                for start in range(0, count, MESSAGE):
                    stop = min(start + MESSAGE, count)
                    part = torch.zeros(stop - start, device=device) if numbers is None else numbers[start:stop]
                    # Broadcast, because for messages to one rank NCCL would need separate connections and buffers.
                    if self.is_connected and shard.owner != 0:
                        dist.broadcast(part, src=shard.owner)
                    if self.rank == 0:
                        place = into[shard.name][key].view(-1)
                        place = place[shard.start : shard.stop][start:stop] if shape else place
                        place.copy_(part, non_blocking=True)
