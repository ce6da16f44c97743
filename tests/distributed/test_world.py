"""World's collective operations between real processes: the results and errors on every rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.distributed.watchdog import collective_timeout_seconds
from tests.support.launch import Workshop, finish, rank_variables
from tests.support.same_end import assert_equal

# Calls each operation in turn and saves all results and errors in one file for each rank.
WORKER = """
import os
import sys
import time
from pathlib import Path

import torch

from harness.common.errors import RunError, UserError, one_line_errors
from harness.distributed.world import World

TREE = {
    "step": torch.tensor(3.0),
    "state": [{"mean": torch.arange(6).reshape(2, 3).T, "lr": 0.1}, (torch.ones(2, dtype=torch.bfloat16), None)],
    "none": torch.ones(0, 4),
    "flags": torch.tensor([True, False]),
}


def raising(error):
    def work():
        raise error
    return work


def caught(call, *arguments):
    try:
        return call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def hear_of_the_stop(world):
    deadline = time.monotonic() + 60
    while world.size > 1 and not world.watchdog.is_anyone_stopping() and time.monotonic() < deadline:
        time.sleep(0.05)
    return world.watchdog.is_anyone_stopping()


with one_line_errors():
    asked = []
    world = World.join(lambda: bool(asked))
    rank = world.rank
    found = {"who": [rank, world.size, world.local_rank, world.is_main, world.size == world.local_size]}
    found["gather"] = world.gather({"rank": rank})
    pending = world.async_max(rank, 7 - rank, 5)
    second = world.async_max(-rank)
    found["async_max"] = [second(), pending()]
    exchanged, kept = [], dict(vars(torch.distributed))
    torch.distributed.all_reduce = lambda tensor: (exchanged.append(tensor.nbytes), kept["all_reduce"](tensor))
    torch.distributed.broadcast = lambda tensor, src: (exchanged.append(-tensor.nbytes), kept["broadcast"](tensor, src))
    world.exchange_once([2**20, 4])
    torch.distributed.all_reduce, torch.distributed.broadcast = kept["all_reduce"], kept["broadcast"]
    found["exchange_once"] = exchanged
    found["monitor"] = float(os.environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 0))
    found["on_rank0"] = world.on_rank0(lambda: f"of rank {rank}")
    found["on_each_node"] = world.on_each_node(lambda: f"of rank {rank}")
    found["broadcast"] = world.broadcast(lambda: TREE if rank == 0 else raising(AssertionError)())
    found["UserError"] = caught(world.on_rank0, raising(UserError("a wrong file")))
    found["RunError"] = caught(world.broadcast, raising(RunError("a full disk")))
    found["defect"] = caught(world.on_each_node, raising(ValueError("a defect")))
    found["collective_error"] = caught(raising(world.collective_error("a loss of nan")))
    found["after_errors"] = world.gather(rank)
    if rank == world.size - 1:
        asked.append(True)
    found["stopping"] = hear_of_the_stop(world)
    torch.save(found, Path(sys.argv[1]) / f"{rank}.pt")
    world.leave()
    print(f"rank {rank} has left")
"""


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank, in a world of one rank and in one of two."""
    size = request.param
    shop = Workshop(tmp_path_factory.mktemp("world"))
    (shop.path / "worker.py").write_text(WORKER)
    command = [str(shop.path / "worker.py"), str(shop.path)]
    finish([shop.fork(command, place) for place in rank_variables(size)], expect=0, timeout=120)
    return [torch.load(shop.path / f"{rank}.pt", weights_only=True) for rank in range(size)]


def everywhere(ranks: list[dict[str, Any]], name: str) -> Any:
    """Return the result `name`, which must be equal on all ranks."""
    assert all(rank[name] == ranks[0][name] for rank in ranks), [rank[name] for rank in ranks]
    return ranks[0][name]


def test_every_rank_has_the_results_of_all(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    for rank, found in enumerate(ranks):
        assert found["who"] == [rank, size, rank, rank == 0, True]
    assert everywhere(ranks, "gather") == [{"rank": rank} for rank in range(size)]
    assert everywhere(ranks, "after_errors") == list(range(size)), "collective calls must still work after errors"
    assert everywhere(ranks, "async_max") == [[0], [size - 1, 7, 5]], (
        "the largest of each number, with two calls pending"
    )
    sent = [2**20, -(2**20), 4, -4]  # bytes; negative for a broadcast
    assert everywhere(ranks, "exchange_once") == (sent if size > 1 else [])
    assert size == 1 or everywhere(ranks, "monitor") > collective_timeout_seconds(), "the watchdog reports first"
    assert everywhere(ranks, "on_rank0") == everywhere(ranks, "on_each_node") == "of rank 0"
    assert everywhere(ranks, "stopping") == (size > 1), "a signal to one rank is known to all"
    own_error = ("UserError: a wrong file", "RunError: a full disk", "ValueError: a defect", "RunError: a loss of nan")
    peers_error = ("a wrong file", "a full disk", "ValueError('a defect')", "a loss of nan")
    names = ("UserError", "RunError", "defect", "collective_error")
    for name, own, peers in zip(names, own_error, peers_error, strict=True):
        assert [found[name] for found in ranks] == [own] + [f"PeerError: {peers}"] * (size - 1)


def test_a_tree_of_tensors_reaches_every_rank(ranks: list[dict[str, Any]]) -> None:
    wanted = {
        "step": torch.tensor(3.0),
        "state": [
            {"mean": torch.tensor([[0, 3], [1, 4], [2, 5]]), "lr": 0.1},
            (torch.ones(2, dtype=torch.bfloat16), None),
        ],
        "none": torch.ones(0, 4),
        "flags": torch.tensor([True, False]),
    }
    for found in ranks:
        assert_equal(found["broadcast"], wanted, "broadcast")


LEAVES_NEVER = (
    "import time, torch.distributed, harness.distributed.world as world\n"
    "torch.distributed.destroy_process_group = lambda: time.sleep(1000)\n"
    "world.LEAVING_SECONDS = 0.5\n"
)


def test_connections_that_cannot_be_closed_do_not_keep_a_finished_run(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.add_dataset()
    run = shop.add_run(min_train_tokens=256)
    began = time.monotonic()
    result = shop.train(prelude=LEAVES_NEVER)
    assert time.monotonic() - began < 100
    assert (run / "summary.json").exists()
    for rank in (0, 1):
        line = f"note: rank {rank} could not close its connections within 0.5 s, and leaves them open"
        assert line in result.stderr
