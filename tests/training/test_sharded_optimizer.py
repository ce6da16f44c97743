"""`shard_optimizer`: each rank keeps and updates a share of the optimizer's state, and no bit of the result differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt import GPTModel, ModelConfig
from harness.distributed.world import World
from harness.runs.train_config import TrainConfig
from harness.training.optimizer import build_optimizer
from harness.training.zero1 import GRAIN, StatePartition
from tests.support.launch import Workshop, finish, free_port

# No size divides by the number of ranks, and there are shards on both sides of what travels alone.
MODEL: dict[str, Any] = {
    "vocab_size": 4999,
    "context_length": 9,
    "emb_dim": 58,
    "n_heads": 2,
    "n_layers": 3,
    "drop_rate": 0.0,
}
SETTINGS: dict[str, Any] = {
    "dataset": "a/b",
    "microbatch_size": 1,
    "min_train_tokens": 1,
    "start_train_token": 0,
    "checkpoint_interval": 1,
    "learning_rate": 0.01,
    "precision": "fp32",
}
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw"},
    "muon": {"optimizer": "muon", "muon_momentum_warmup_steps": 3},
    "groups": {"optimizer": "muon", "embedding_learning_rate": 0.1, "decay_all_parameters": False},
    "fp16": {"optimizer": "adamw", "precision": "fp16"},
}
# Trains with gradients that are alike on all ranks, shared out and not; a step whose gradients are not finite is one of
# them. On rank 0 what both come to is compared to the bit, and saved; every rank says how much state it holds.
WORKER = """
import json
import math
import sys
from pathlib import Path

import torch

from gpt import GPTModel, ModelConfig
from harness.distributed.world import World
from harness.model.precision import Precision
from harness.runs.train_config import TrainConfig
from harness.training.optimizer import build_optimizer
from harness.training.zero1 import StatePartition

config, model_config, out, earlier = (json.loads(argument) for argument in sys.argv[1:])
world = World.join()


def bytes_of_state(optimizer):
    inner = getattr(optimizer, "_adamw")
    states = getattr(inner, "_adamw", inner).state.values()
    tensors = [value for state in states for key, value in state.items() if key != "step"]
    tensors += [*getattr(optimizer, "_whole", {}).values()] or [*getattr(optimizer, "_momenta", {}).values()]
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tensors}
    return sum(storages.values())


def train(sharded):
    saved = torch.load(earlier, weights_only=True, map_location="cpu") if earlier else None
    settings = TrainConfig(**config, shard_optimizer=sharded)
    precision = Precision.for_training(settings.precision, world.device)
    torch.manual_seed(0)
    model = GPTModel(ModelConfig(**model_config))
    optimizer, scaler = build_optimizer(model, settings, precision, StatePartition.for_world(world)), precision.scaler()
    if saved is not None:
        model.load_state_dict(saved["weights"])
        optimizer.load_named_state(saved["state"])
    generator = torch.Generator().manual_seed(1 if saved is None else 2)
    skips = []
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * float(scaler.scale(torch.tensor(1.0)))
        if step == 2:
            model.out_head.weight.grad[-1, -1] = math.inf
        optimizer.set_multiplier(1 / (step + 1))
        _, skipped = optimizer.update(scaler, 1.0 if step % 2 else None)
        skips.append(int(skipped))
    assert skips == [0, 0, 1, 0], skips
    found = {"weights": model.state_dict(), "state": optimizer.named_state(world), "scale": scaler.state_dict()}
    return {**found, "bytes": bytes_of_state(optimizer)}


def same(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


sharded, whole = train(True), train(False)
assert same(sharded["weights"], whole["weights"]), "weights"
assert same(sharded["scale"], whole["scale"]), "scale"
assert not sharded["state"] or world.is_main
assert same(sharded["state"], whole["state"]), "state"
held = world.gather((sharded["bytes"], whole["bytes"]))
if world.is_main:
    sharded["held"] = held
    torch.save(sharded, out)
world.leave()
"""


def train(shop: Workshop, ranks: int, case: str, out: Path, earlier: Path | None = None) -> Any:
    """Return the result of sharded training by so many ranks, compared with training that shares nothing."""
    (shop.path / "worker.py").write_text(WORKER)
    config = SETTINGS | CASES[case]
    arguments = [json.dumps(each) for each in (config, MODEL | {"qkv_bias": True}, str(out), earlier and str(earlier))]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {} for rank in range(ranks)]
    command = [str(shop.path / "worker.py"), *arguments]
    finish([shop.fork(command, (shared if ranks > 1 else {}) | place) for place in places], expect=0, timeout=200)
    return torch.load(out, weights_only=True, map_location="cpu")


@pytest.mark.parametrize(("case", "worlds"), [("adamw", (4, 2)), ("muon", (2, 4)), ("groups", (2,)), ("fp16", (2,))])
def test_no_bit_differs_and_a_state_goes_on_in_a_world_of_another_size(
    tmp_path: Path, case: str, worlds: tuple[int, ...]
) -> None:
    """Each world's sharded training equals its own that shares nothing; the next world continues from its state."""
    shop, earlier = Workshop(tmp_path), None
    for number, ranks in enumerate((*worlds, 1)):
        out = tmp_path / f"{number}.pt"
        found = train(shop, ranks, case, out, earlier)
        model = GPTModel(ModelConfig(**MODEL, qkv_bias=True))
        assert list(found["state"]) == [name for name, _ in model.named_parameters()]
        assert {float(state["step"]) for state in found["state"].values()} == {3.0 * (number + 1)}
        shared = [sharded for sharded, _ in found["held"]]
        whole = found["held"][0][1]
        assert sum(shared) == whole
        assert max(shared) < whole / ranks * 1.1
        earlier = out


def test_slices_are_equal_cover_everything_and_keep_vectors_whole() -> None:
    sizes = {"a": 1000, "b": 7, "c": 64, "d": 12345, "e": 1}
    for ranks in (1, 2, 3, 4, 8, 100):
        shards = StatePartition(0, ranks).cut(sizes)
        for name, size in sizes.items():
            own = [shard for shard in shards if shard.name == name]
            assert [own[0].start, *(shard.stop for shard in own)] == [*(shard.start for shard in own), size]
            assert all(shard.start % GRAIN == 0 for shard in own)
        owned = [sum(shard.stop - shard.start for shard in shards if shard.owner == rank) for rank in range(ranks)]
        assert max(owned) <= sum(sizes.values()) / ranks + len(sizes) * GRAIN


def test_works_that_cannot_be_cut_are_spread_by_what_they_cost() -> None:
    costs = [1.0, 8.0, 4.0, 4.0, 1.0, 1.0, 1.0, 4.0]
    owners = StatePartition(0, 3).owners(costs)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(3)]
    assert max(loads) == sum(costs) / 3


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_process_that_rehearses_for_others_keeps_its_own_share_and_saves_the_whole(optimizer: str) -> None:
    """-f tries microbatches on each rank alone, with the memory that it will have among others."""
    config = TrainConfig(**SETTINGS | {"optimizer": optimizer, "shard_optimizer": True})
    model = GPTModel(ModelConfig(**MODEL, qkv_bias=True))
    built = build_optimizer(model, config, None, StatePartition(0, 4))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    built.update(torch.amp.GradScaler("cpu", enabled=False), None)
    state = built.named_state(World(0, 0, 1, 1, torch.device("cpu")))
    shapes = {name: {key: value.shape for key, value in each.items()} for name, each in state.items()}
    assert shapes == built.state_shapes()
    moments = torch.cat([each.flatten() for one in state.values() for key, each in one.items() if key != "step"])
    assert 0.2 < (moments != 0).float().mean() < 0.3
