"""What the environment says of this process's place among the ranks. Read without torch, before any rank speaks.

torchrun sets RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, and MASTER_ADDR and MASTER_PORT, where the ranks meet
(torch.distributed's `env://`); so may whoever starts ranks in another way. Without any of them this is the only
process. A part of them is a leftover: the run would be another than was meant, or wait for ranks that never come.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from harness.common.errors import UserError
from harness.common.messages import quoted

# In the order of Place's fields.
COUNTS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
RENDEZVOUS_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
LARGEST_PORT = 65535


@dataclass(frozen=True)
class Place:
    """One process among all (`rank` of `world_size`), and among those of its machine."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def rank() -> int:
    """This process's number among all ranks of the job; 0 without a launcher. Raises UserError like `place`."""
    return place().rank


def local_rank() -> int:
    """This process's number among the ranks of its machine; 0 without a launcher. Raises UserError like `place`."""
    return place().local_rank


def world_size() -> int:
    """The number of ranks; 1 without a launcher. Raises UserError like `place`."""
    return place().world_size


def local_world_size() -> int:
    """The number of ranks on this machine; 1 without a launcher. Raises UserError like `place`."""
    return place().local_world_size


def is_rank0() -> bool:
    """Whether this process is rank 0, which speaks for all. Raises UserError like `place`."""
    return rank() == 0


def announce(run: str) -> None:
    """Say on rank 0 that ranks are starting: the next line takes seconds, in which torch is loaded and they meet."""
    if is_rank0():
        count = world_size()
        print(f"{run}: starting {count} {'process' if count == 1 else 'processes'}", flush=True)


def place() -> Place:
    """All four numbers, checked. Raises UserError naming a variable that is missing beside the others, or that is not a
    number, or not a possible one."""
    given = [name for name in COUNTS if name in os.environ]
    if not given:
        return Place()
    for name in COUNTS:
        if name not in os.environ:
            raise _stray(f"{given[0]} is set, but {name} is not, and a rank needs {', '.join(COUNTS)}")
    found = Place(*(_number(name) for name in COUNTS))
    for fits, name, bound in (
        (found.rank < found.world_size, "RANK", "WORLD_SIZE"),
        (found.local_rank < found.local_world_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        (found.local_world_size <= found.world_size, "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
        (found.local_rank <= found.rank, "LOCAL_RANK", "RANK"),
    ):
        if not fits:
            raise _stray(f"{name}={os.environ[name]} is impossible with {bound}={os.environ[bound]}")
    if found.world_size > 1:
        _check_rendezvous_address()
    return found


def _number(name: str) -> int:
    text = os.environ[name]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise _stray(f"{name} is {quoted(text)}, which is not a whole number")
    return int(text)


def _check_rendezvous_address() -> None:
    for name in RENDEZVOUS_ADDRESS:
        if not os.environ.get(name):
            raise _stray(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {name}, where the ranks meet, is not set")
    if not 1 <= _number("MASTER_PORT") <= LARGEST_PORT:
        raise _stray(f"MASTER_PORT is {os.environ['MASTER_PORT']}; ports are 1 to {LARGEST_PORT:,}")


def _stray(fault: str) -> UserError:
    given = " ".join(name for name in COUNTS if name in os.environ)
    return UserError(f"environment: {fault}; start all ranks with torchrun, or for a single process `unset {given}`")
