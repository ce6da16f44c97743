"""`shard_optimizer`: each rank stores and updates only its part of the optimizer state, and the results equal those of
training without it to the bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from gpt import GPTModel, ModelConfig
from harness.runs.train_config import TrainConfig
from harness.training.step import OptimizerStep
from harness.training.zero1 import GRAIN, StatePartition
from tests.support.configs import SEED_TRAIN
from tests.support.launch import MODEL as SMALL_MODEL
from tests.support.launch import Workshop, finish, rank_variables
from tests.training.test_optimizer import state_of, update

# The ranks' equal parts begin inside parameters, so that some parameters are cut. Some shards are above and some below
# SMALL_PIECE, the size from which a shard is broadcast in a message of its own.
MODEL = SMALL_MODEL | {"vocab_size": 4999, "context_length": 9, "emb_dim": 58, "n_layers": 3, "drop_rate": 0.0}
SETTINGS = SEED_TRAIN | {"learning_rate": 0.01, "precision": "fp32"}
WORLDS = (3, 2)  # numbers of ranks; each world starts from the state that the previous world saved
# Name of the case -> keys of train.json, and "moe", a key of model.json.
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw"},
    "muon": {"optimizer": "muon", "muon_momentum_warmup_steps": 3},
    "groups": {"optimizer": "muon", "embedding_learning_rate": 0.1, "decay_all_parameters": False},
    "fp16": {"optimizer": "adamw", "precision": "fp16"},
    "experts": {"optimizer": "muon", "moe": {"num_experts": 3, "num_active_experts": 2}},
}
# Trains each case twice, with the optimizer state sharded and unsharded, on gradients that are the same on all ranks.
# The gradients of one step are not finite. Rank 0 checks that both results are equal to the bit and saves the sharded
# one, with the bytes of state on every rank. One job trains all cases, each from the state that the previous world
# saved.
WORKER = """
import copy
import io
import json
import math
import sys
from pathlib import Path

import torch

from gpt import GPTModel, ModelConfig
from harness.distributed.world import World
from harness.runs.train_config import TrainConfig
from harness.training import zero1
from harness.training.saving import HostCopies, copy_state
from harness.training.step import OptimizerStep
from harness.training.zero1 import StatePartition

zero1.MESSAGE = 10_000  # so that a shard is sent in several messages
cases, model_config, out, earlier = (json.loads(argument) for argument in sys.argv[1:])
world = World.join()


def bytes_of_state(optimizer):
    states = getattr(optimizer, "_adamw", optimizer).state.values()
    tensors = [value for state in states for key, value in state.items() if key != "step"]
    tensors += getattr(optimizer, "_momenta", {}).values()
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tensors}
    return sum(storages.values())


def train(keys, saved, sharded):
    shape = {**model_config, **({"moe": keys["moe"]} if "moe" in keys else {})}
    settings = TrainConfig(**{key: value for key, value in keys.items() if key != "moe"}, shard_optimizer=sharded)
    torch.manual_seed(0)
    model = GPTModel(ModelConfig(**shape))
    step = OptimizerStep(model, settings, StatePartition(world.rank, world.size, is_connected=world.size > 1))
    if saved is not None:
        model.load_state_dict(saved["weights"])
        step.optimizer.load_named_state(copy.deepcopy(saved["state"]))  # both ways of training begin with it
    generator = torch.Generator().manual_seed(1 if saved is None else 2)
    skips = []

    def accumulate(number):
        for parameter in model.parameters():
            scale = float(step.scaler.scale(torch.tensor(1.0)))
            parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
        if number == 2:
            model.out_head.weight.grad[-1, -1] = math.inf
        return torch.zeros(1), None

    step.accumulate = accumulate
    for number in range(4):
        step.config = settings.model_copy(update={"clipping_max_norm": 1.0 if number % 2 else None})
        skips.append(int(step.run(number, 1 / (number + 1)).skipped))
    assert skips == [0, 0, 1, 0], skips
    copied = copy_state(step, world, HostCopies(torch.device("cpu"), keep=True))
    found = {"weights": model.state_dict(), "state": copied["optimizer"] if world.is_main else {}}
    return {**found, "scale": step.scaler.state_dict(), "bytes": bytes_of_state(step.optimizer)}


ends = {}
begun = torch.load(earlier, weights_only=True, map_location="cpu") if earlier else {}
for name, keys in cases.items():
    sharded, whole = (train(keys, begun.get(name), flag) for flag in (True, False))
    for part in ("weights", "scale"):
        torch.testing.assert_close(sharded[part], whole[part], rtol=0, atol=0, msg=f"{name}: {part}")
    assert not sharded["state"] or world.is_main
    torch.testing.assert_close(sharded["state"], whole["state"], rtol=0, atol=0, msg=f"{name}: state")
    files = [io.BytesIO(), io.BytesIO()]
    for file, state in zip(files, (sharded["state"], whole["state"])):
        torch.save(state, file)
    assert files[0].getvalue() == files[1].getvalue(), (name, "bytes of optimizer.pt")
    ends[name] = {**sharded, "held": world.gather((sharded["bytes"], whole["bytes"]))}
if world.is_main:
    torch.save(ends, out)
world.leave()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Results of sharded training: number of ranks -> case -> result. Each world starts from the results of the
    previous world. The processes of each world compare sharded with unsharded training."""
    shop, found, earlier = Workshop(tmp_path_factory.mktemp("sharded")), {}, None
    (shop.path / "worker.py").write_text(WORKER)
    cases = {name: SETTINGS | keys for name, keys in CASES.items()}
    for ranks in WORLDS:
        out = shop.path / f"{ranks}.pt"
        arguments = [json.dumps(each) for each in (cases, MODEL, str(out), earlier and str(earlier))]
        command = [str(shop.path / "worker.py"), *arguments]
        finish([shop.fork(command, place) for place in rank_variables(ranks)], expect=0, timeout=200)
        found[ranks], earlier = torch.load(out, weights_only=True, map_location="cpu"), out
    return found


@pytest.mark.parametrize("case", CASES)
def test_no_bit_differs_and_a_state_goes_on_in_a_world_of_another_size(trained: dict[int, Any], case: str) -> None:
    model = GPTModel(ModelConfig(**MODEL, moe=CASES[case].get("moe")))
    for number, ranks in enumerate(WORLDS):
        found = trained[ranks][case]
        assert list(found["state"]) == [name for name, _ in model.named_parameters()]
        assert {float(state["step"]) for state in found["state"].values()} == {3.0 * (number + 1)}
        shared = [sharded for sharded, _ in found["held"]]
        whole = found["held"][0][1]
        assert sum(shared) == whole
        assert max(shared) < whole / ranks * 1.1


def test_shards_are_equal_aligned_and_cover_everything() -> None:
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
def test_a_rank_that_exchanges_nothing_keeps_its_part_and_returns_full_shapes(optimizer: str) -> None:
    """A rank that tries microbatches (-f) exchanges nothing with other ranks. It stores only its own part of the
    optimizer state, as in training, and `named_state` returns tensors of full shape."""
    config = TrainConfig(**SETTINGS | {"optimizer": optimizer, "shard_optimizer": True})
    step = OptimizerStep(GPTModel(ModelConfig(**MODEL)), config, StatePartition(0, 4))
    for parameter in step.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    update(step)
    state = state_of(step.optimizer)
    shapes = {name: {key: value.shape for key, value in each.items()} for name, each in state.items()}
    assert shapes == step.optimizer.state_shapes()
    moments = torch.cat([each.flatten() for one in state.values() for key, each in one.items() if key != "step"])
    assert 0.2 < (moments != 0).float().mean() < 0.3
