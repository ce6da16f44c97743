"""Killed at any instant.

SIGKILL ends rank 0 at each file operation of a save, or any rank at random instants. The same command, run again, must
reach the end of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.support import file_operations
from tests.support.jobs import VANISH_SECONDS, assert_named_are_whole, for_each, said, set_pace, start, train, wait_for
from tests.support.launch import SAVED_OFTEN, Workshop
from tests.support.same_end import assert_same_end

SETTINGS = SAVED_OFTEN | {"min_train_tokens": 64 * 7}


@dataclass(frozen=True)
class Call:
    """Call of one of the functions in file_operations.CALLS during which a rank is killed. `number` (from 0) counts the
    calls of that function in a run with these settings."""

    name: str
    number: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return 2 if self.settings == SHARDED else 1

    def run_name(self, suffix: object) -> str:
        return "-".join([self.name.replace(" ", "-"), str(self.number), *self.settings, str(suffix)])


# The state of a sharded optimizer is gathered from all ranks before rank 0 writes it.
SHARDED: dict[str, Any] = {"optimizer": "muon", "muon_momentum_warmup_steps": 5, "shard_optimizer": True}
SHARDED |= {"min_train_tokens": 128 * 7}  # on two ranks
# The calls of each test have the same settings.
SAVES = [Call("save", 0), Call("save", 1), Call("save", 2)]  # the first, of latest alone, of latest and best
END = [Call("save", 3), Call("end")]
SHARDED_SAVE = [Call("save", 2, SHARDED)]
PRUNING = [Call("save", 2, {"keep_checkpoints": 1})]
BACKGROUND = [Call("background save", 2, {"keep_checkpoints": 1, "async_checkpoint": True})]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> Workshop:
    set_pace(exhaustive)
    shop = Workshop(tmp_path_factory.mktemp("kills"))
    shop.add_dataset()
    return shop


def straight(shop: Workshop, call: Call) -> Path:
    """Return the undisturbed run with the optimizer and the number of ranks of `call`. Train it if it does not exist
    yet."""
    settings = SHARDED if call.settings == SHARDED else {}
    name = f"straight-{call.ranks}"
    run = shop.runs / name
    if not run.exists():
        shop.add_run(name, **SETTINGS | settings)
        train(shop, name, ranks=call.ranks)
    return run


def operations_of(shop: Workshop, calls: Sequence[Call]) -> list[list[str]]:
    """Return the file operations during each of `calls`, as one undisturbed run logs them. All calls must have the same
    settings."""
    paths, name = [shop.path / call.run_name("operations") for call in calls], calls[0].run_name("dry")
    run = shop.add_run(name, **SETTINGS | calls[0].settings)
    logs = [
        file_operations.prelude(call.name, call.number, "log", path) for call, path in zip(calls, paths, strict=True)
    ]
    shop.train(name, ranks=calls[0].ranks, prelude="".join(logs))
    assert_same_end(straight(shop, calls[0]), run)
    return [path.read_text().splitlines() for path in paths]


def kill_at(shop: Workshop, call: Call, operation: int) -> None:
    """Kill rank 0 at a file operation, check what is left, and resume the run to its end."""
    name = call.run_name(operation)
    run = shop.add_run(name, **SETTINGS | call.settings)
    killing = file_operations.prelude(call.name, call.number, "kill", operation)
    processes = start(shop, name, ranks=call.ranks, prelude=killing)
    killed = wait_for(processes[0], 60)
    assert killed in (-signal.SIGKILL, -signal.SIGXFSZ), said(processes)
    for process in processes[1:]:
        wait_for(process, VANISH_SECONDS)
    assert_named_are_whole(run)
    train(shop, name, ranks=call.ranks)
    assert_same_end(straight(shop, call), run)
    assert (run / "summary.json").exists()
    assert not list((run / "checkpoints").glob(".*")), "leftovers of the killed process are removed"


# The calls, and without --exhaustive, of how many places one is tried
CASES = [
    pytest.param(SAVES, 11, id="save"),
    pytest.param(END, 9, id="end", marks=pytest.mark.slow),
    pytest.param(PRUNING, 19, id="deleting", marks=pytest.mark.slow),
    pytest.param(BACKGROUND, 19, id="background", marks=pytest.mark.slow),
    pytest.param(SHARDED_SAVE, 19, id="sharded", marks=pytest.mark.slow),
]


@pytest.mark.fault(
    "killed in a save",
    "at each file operation, also of sharded and background saves and while old checkpoints are deleted: all "
    "checkpoints are whole; resumed to the same end",
)
@pytest.mark.fault("killed at the end of the run", "at every file operation: resumed to the same end, with its summary")
@pytest.mark.parametrize(("calls", "each_of"), CASES)
def test_killed_at_each_operation(shop: Workshop, calls: list[Call], each_of: int, exhaustive: bool) -> None:
    places = []
    for call, names in zip(calls, operations_of(shop, calls), strict=True):
        assert len(names) > (20 if call.name != "end" else 3), names
        places += [(call, number) for number in range(len(names))]
    for_each(places if exhaustive else places[each_of // 2 :: each_of], lambda place: kill_at(shop, *place))


# The places at which a rank's death begins, and the seconds after each within which it is killed. If kills come at each
# place in turn, a run needs at most 18 steps for each life before the last kill, however fast the machine is.
PLACES = {"START": 0.6, "CHECK": 0.1, "STEP": 0.1, "VALIDATION": 0.1, "SAVE": 0.1}
CYCLE, STEPS_A_LIFE = 10, 20  # steps from one validation and save to the next, and at most in a life
SLOWLY = """
from tests.support.faults import *
for place, seconds in ((STEP, 0.01), (VALIDATION, 0.1), (SAVE, 0.05)):
    before(place, pause(seconds))
"""


@pytest.mark.slow
@pytest.mark.fault(
    "killed again and again",
    "50 times, either of two ranks at any instant, with sharded state: resumed to the same end",
)
def test_killed_at_random_instants(shop: Workshop, exhaustive: bool) -> None:
    """A rank of one run, drawn at random, is killed again and again, at a random instant of its work."""
    kills, dice = 50 if exhaustive else 5, random.Random(0)
    settings = SETTINGS | SHARDED | {"min_train_tokens": 128 * STEPS_A_LIFE * kills, "dataset": "local/long"}
    settings |= {"validation_interval": CYCLE, "checkpoint_interval": CYCLE, "keep_checkpoints": 2}
    shop.add_dataset("local/long", tokens=128 * (STEPS_A_LIFE + 1) * kills)
    unharmed, harmed = [shop.add_run(name, **settings) for name in ("unharmed", "harmed")]
    train(shop, unharmed.name, ranks=2, timeout=100 + 5 * kills)
    vanishing = []
    with ThreadPoolExecutor() as pool:
        for place in itertools.islice(itertools.cycle(PLACES), kills):
            victim, seconds = dice.randrange(2), dice.uniform(0, PLACES[place])
            killing = f"before({place}, kill_after({seconds}), rank={victim}, call=1)"
            processes = start(shop, harmed.name, ranks=2, prelude=SLOWLY + killing)
            assert wait_for(processes[victim], 60) == -signal.SIGKILL, said(processes)
            processes[1 - victim].terminate()  # as torchrun does
            vanishing.append(pool.submit(wait_for, processes[1 - victim], VANISH_SECONDS))
            if victim == 1:  # otherwise the next life starts at once, while rank 1 still runs
                vanishing[-1].result()
            assert_named_are_whole(harmed)
        for future in vanishing:
            future.result()
    train(shop, harmed.name, ranks=2, timeout=100 + 5 * kills)
    assert_same_end(unharmed, harmed)


@pytest.mark.slow
@pytest.mark.fault(
    "killed again and again, on one rank or two at random",
    "100 times, on a shuffled mixture of datasets, in two epochs, without dropout: the weights of an undisturbed run",
)
def test_a_mixture_killed_in_changing_worlds(shop: Workshop, exhaustive: bool) -> None:
    """Without dropout, two ranks have the sums of one rank with two accumulation steps, to the bit."""
    kills, dice = 100 if exhaustive else 4, random.Random(1)
    names = ("local/prose", "local/verse")
    steps = STEPS_A_LIFE * kills  # of four windows, 0.7 of them from the first dataset
    for seed, (name, share) in enumerate(zip(names, (0.7, 0.3), strict=True)):
        shop.add_dataset(name, tokens=int(4 * steps * share / 1.9) * 16 + 1, seed=seed)
    settings = SETTINGS | {"min_train_tokens": 64 * steps, "validation_interval": CYCLE, "checkpoint_interval": CYCLE}
    settings |= {"gradient_accumulation_steps": None, "global_batch_size": 4, "keep_checkpoints": 2}
    settings |= {"shuffle": True, "epochs": 2, "precision": "fp32"}
    settings["dataset"] = [{"name": name, "weight": weight} for name, weight in zip(names, (0.7, 0.3), strict=True)]
    unharmed, harmed = [shop.add_run(name, model={"drop_rate": 0.0}, **settings) for name in ("whole", "changing")]
    train(shop, unharmed.name, timeout=100 + 5 * kills)
    for place in itertools.islice(itertools.cycle(PLACES), kills):
        ranks = dice.choice((1, 2))
        killing = f"before({place}, kill_after({dice.uniform(0, PLACES[place])}), rank=0, call=1)"
        processes = start(shop, harmed.name, ranks=ranks, prelude=SLOWLY + killing)
        assert wait_for(processes[0], 60) == -signal.SIGKILL, said(processes)
        for other in processes[1:]:
            other.terminate()
            wait_for(other, VANISH_SECONDS)
        assert_named_are_whole(harmed)
    train(shop, harmed.name, ranks=2, timeout=100 + 5 * kills)
    ends = [load_file(run / "checkpoints" / "latest" / "model.safetensors") for run in (unharmed, harmed)]
    assert all((ends[0][key] == ends[1][key]).all() for key in ends[0])
    epochs = [json.loads((run / "summary.json").read_text())["epochs"] for run in (unharmed, harmed)]
    assert epochs[0] == epochs[1]
    assert all(1.8 < passes <= 2 for passes in epochs[0].values())
