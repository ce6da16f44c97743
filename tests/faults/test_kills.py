"""Killed at any instant.

SIGKILL ends rank 0 at each file operation of a save, or any rank at random instants. The same command, run again, must
reach the end of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import file_operations
from tests.support.jobs import VANISH_SECONDS, assert_named_are_whole, for_each, said, set_pace, start, train, wait_for
from tests.support.launch import Process, Workshop
from tests.support.same_end import assert_same_end

EACH_OF = 9  # without --exhaustive, one of so many places is tried
SETTINGS: dict[str, Any] = {
    "min_train_tokens": 128 * 7,
    "validation_interval": 4,
    "checkpoint_interval": 2,
    "report_interval": 2,
    "learning_rate": 0.01,
}


@dataclass(frozen=True)
class Call:
    """Call of file_operations.CALLS during which a rank is killed: call `number` (from 0) of a run with these
    settings."""

    name: str
    number: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def run_name(self, suffix: object) -> str:
        return "-".join([self.name.replace(" ", "-"), str(self.number), *self.settings, str(suffix)])


FIRST, ONLY_LATEST, LATEST_AND_BEST, LAST = (Call("save", number) for number in (0, 1, 2, 3))
# The state of a sharded optimizer is gathered from all ranks before rank 0 writes it.
SHARDED: dict[str, Any] = {"optimizer": "muon", "muon_momentum_warmup_steps": 5, "shard_optimizer": True}
SHARDED_SAVE = Call("save", 2, SHARDED)
PRUNING = Call("save", 2, {"keep_checkpoints": 1})
BACKGROUND = Call("background save", 2, {"keep_checkpoints": 1, "async_checkpoint": True})
END = Call("end")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> Workshop:
    set_pace(exhaustive)
    shop = Workshop(tmp_path_factory.mktemp("kills"))
    shop.add_dataset()
    return shop


def straight(shop: Workshop, call: Call) -> Path:
    """Return the undisturbed run with the call's optimizer, and train it if this has not been done."""
    settings = SHARDED if call.settings == SHARDED else {}
    name = f"straight-{settings.get('optimizer', 'adamw')}"
    run = shop.runs / name
    if not run.exists():
        shop.add_run(name, **SETTINGS | settings)
        shop.train(name, prelude=file_operations.WITHOUT_CHARTS)
    return run


def operations_of(shop: Workshop, calls: Sequence[Call]) -> list[list[str]]:
    """Return the file operations of each of the calls, in one undisturbed run. The calls must have the same
    settings."""
    paths, name = [shop.path / call.run_name("operations") for call in calls], calls[0].run_name("dry")
    run = shop.add_run(name, **SETTINGS | calls[0].settings)
    logs = [
        file_operations.prelude(call.name, call.number, "log", path) for call, path in zip(calls, paths, strict=True)
    ]
    shop.train(name, prelude="".join(logs))
    assert_same_end(straight(shop, calls[0]), run)
    return [path.read_text().splitlines() for path in paths]


def kill_at(shop: Workshop, call: Call, operation: int) -> None:
    """Kill rank 0 at a file operation, check what is left, and resume the run to its end."""
    name = call.run_name(operation)
    run = shop.add_run(name, **SETTINGS | call.settings)
    processes = start(shop, name, prelude=file_operations.prelude(call.name, call.number, "kill", operation))
    killed = wait_for(processes[0], 60)
    assert killed in (-signal.SIGKILL, -signal.SIGXFSZ), said(processes)
    wait_for(processes[1], VANISH_SECONDS)
    assert_named_are_whole(run)
    train(shop, name)
    assert_same_end(straight(shop, call), run)
    assert (run / "summary.json").exists()
    assert not list((run / "checkpoints").glob(".*")), "leftovers of the killed process are removed"


def kill_everywhere(shop: Workshop, calls: Sequence[Call], each_of: int) -> None:
    """Kill rank 0 at one of every `each_of` operations of the calls."""
    places = []
    for call, names in zip(calls, operations_of(shop, calls), strict=True):
        assert len(names) > (20 if call != END else 3), names
        places += [(call, number) for number in range(len(names))]
    places = places[each_of // 2 :: each_of]
    for_each(places, lambda place: kill_at(shop, *place))


@pytest.mark.fault("killed in a save", "at every file operation: all checkpoints are whole; continued to the same end")
@pytest.mark.timeout(900)
def test_killed_at_each_operation_of_a_save(shop: Workshop, exhaustive: bool) -> None:
    kill_everywhere(shop, [FIRST, ONLY_LATEST, LATEST_AND_BEST], 1 if exhaustive else EACH_OF)


@pytest.mark.slow
@pytest.mark.fault(
    "killed while old checkpoints are deleted",
    "at every file operation: all checkpoints are whole; continued to the same end",
)
@pytest.mark.timeout(900)
def test_killed_at_each_operation_of_a_save_that_prunes(shop: Workshop, exhaustive: bool) -> None:
    kill_everywhere(shop, [PRUNING], 1 if exhaustive else 2 * EACH_OF)


@pytest.mark.slow
@pytest.mark.fault(
    "killed in a save in the background",
    "at every file operation: all checkpoints are whole; continued to the same end",
)
@pytest.mark.timeout(900)
def test_killed_at_each_operation_of_a_background_save(shop: Workshop, exhaustive: bool) -> None:
    kill_everywhere(shop, [BACKGROUND], 1 if exhaustive else 2 * EACH_OF)


@pytest.mark.slow
@pytest.mark.fault("killed at the end", "at every file operation: continued to the same end, with its summary")
@pytest.mark.timeout(900)
def test_killed_at_each_operation_of_the_end(shop: Workshop, exhaustive: bool) -> None:
    kill_everywhere(shop, [LAST, END], 1 if exhaustive else EACH_OF)


# Rank {victim} kills itself `seconds` after it enters the phase `awaited` for the first time.
LIFE = """
import os, signal, threading, time
from tests.support.faults import SAVE, START, STEP, VALIDATION, around
rank, awaited = os.environ["RANK"], {awaited!r}
place = os.open({place!r} + rank, os.O_WRONLY | os.O_CREAT)

def die():
    time.sleep({seconds})
    os.kill(os.getpid(), signal.SIGKILL)

def enter(phase):
    global awaited
    os.pwrite(place, phase.ljust(20).encode(), 0)
    if (rank, phase) == ("{victim}", awaited):
        awaited = None
        threading.Thread(target=die, daemon=True).start()

def during(where, phase, after, seconds):
    def noting(original, *values, **named):
        enter(phase)
        time.sleep(seconds)
        try:
            return original(*values, **named)
        finally:
            enter(after)
    around(where, noting)

enter("joining")
during(START, "joining", "start-up", 0)
during(STEP, "training", "training", {step_seconds})
during(VALIDATION, "validation", "training", 0.1)
during(SAVE, "save", "training", 0.05)
"""
STEP_SECONDS = 0.01
CYCLE = 20  # steps from one validation and save to the next
# The phases of a rank's life, and the seconds after the beginning of each within which a rank is killed. If kills come
# in each phase in turn, a run needs at most 28 steps for each life before the last kill, however fast the machine is.
PHASES = {"joining": 0.6, "start-up": 0.1, "training": 0.1, "validation": 0.1, "save": 0.1}
STEPS_A_LIFE = 30
LONG: dict[str, Any] = SETTINGS | {
    "validation_interval": CYCLE,
    "checkpoint_interval": CYCLE,
    "report_interval": 5,
    "keep_checkpoints": 2,
}


class Lives:
    """A run that is killed again and again."""

    def __init__(self, shop: Workshop, name: str) -> None:
        self.shop, self.name = shop, name
        self.place = shop.path / f"{name}-phase-"
        self.dice = random.Random(0)

    def live(self, awaited: str) -> tuple[int, Sequence[Process]]:
        """Start the run's ranks, and let one, drawn at random, be killed at a random instant of a phase or soon after
        it. Return that rank and all processes."""
        for rank in range(2):
            Path(f"{self.place}{rank}").unlink(missing_ok=True)
        victim, seconds = self.dice.randrange(2), self.dice.uniform(0, PHASES[awaited])
        prelude = LIFE.format(
            victim=victim, awaited=awaited, seconds=seconds, place=str(self.place), step_seconds=STEP_SECONDS
        )
        processes = start(self.shop, self.name, prelude=prelude)
        assert wait_for(processes[victim], 60) == -signal.SIGKILL, said(processes)
        phase = Path(f"{self.place}{victim}").read_text().strip()
        if phase == "joining":  # the ranks have not met yet, so that torchrun has to end the other one
            processes[1 - victim].terminate()
        return victim, processes


def kill_again_and_again(shop: Workshop, name: str, settings: dict[str, Any], kills: int) -> None:
    """Kill a rank of one run `kills` times, and compare the run's end with that of an undisturbed run."""
    settings = settings | {"min_train_tokens": 128 * STEPS_A_LIFE * kills}
    dataset, unharmed, harmed = f"local/{name}", f"unharmed-{name}", f"harmed-{name}"
    shop.add_dataset(dataset, tokens=128 * (STEPS_A_LIFE + 1) * kills)
    runs = [shop.add_run(each, dataset=dataset, **settings) for each in (unharmed, harmed)]
    shop.train(unharmed, prelude=file_operations.WITHOUT_CHARTS)
    lives, vanishing = Lives(shop, harmed), []
    with ThreadPoolExecutor() as pool:
        for awaited in itertools.islice(itertools.cycle(PHASES), kills):
            victim, processes = lives.live(awaited)
            vanishing.append(pool.submit(wait_for, processes[1 - victim], VANISH_SECONDS))
            if victim == 1:  # otherwise the next life starts at once, while rank 1 still runs
                vanishing[-1].result()
            assert_named_are_whole(runs[1])
        for future in vanishing:
            future.result()
    shop.train(harmed, prelude=file_operations.WITHOUT_CHARTS)
    assert_same_end(*runs)


@pytest.mark.slow
@pytest.mark.fault("killed again and again", "50 times, any rank at any instant: continued to the same end")
@pytest.mark.timeout(900)
def test_killed_at_random_instants(shop: Workshop, exhaustive: bool) -> None:
    kill_again_and_again(shop, "long", LONG, 50 if exhaustive else 4)


@pytest.mark.slow
@pytest.mark.fault(
    "killed in a save of sharded state", "at every file operation: all checkpoints are whole; continued to the same end"
)
@pytest.mark.timeout(900)
def test_killed_at_each_operation_of_a_save_of_sharded_state(shop: Workshop, exhaustive: bool) -> None:
    kill_everywhere(shop, [SHARDED_SAVE], 1 if exhaustive else 2 * EACH_OF)


@pytest.mark.slow
@pytest.mark.fault(
    "killed again and again with sharded state", "20 times, any rank at any instant: continued to the same end"
)
@pytest.mark.timeout(900)
def test_killed_at_random_instants_with_sharded_state(shop: Workshop, exhaustive: bool) -> None:
    kill_again_and_again(shop, "sharded", LONG | SHARDED, 20 if exhaustive else 5)
