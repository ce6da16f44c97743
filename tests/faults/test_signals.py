"""Signals, and ranks that die.

torchrun and schedulers send SIGTERM, Ctrl-C sends SIGINT. torchrun sends SIGKILL 30 seconds later.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.runs.checkpoints import list_checkpoints
from tests.data.test_fetching import NAME, corpus
from tests.support.fake_hub import FakeHub
from tests.support.jobs import for_each
from tests.support.launch import Result, Workshop, finish
from tests.support.same_end import assert_same_end
from tests.support.straight import FAULTS, SETTINGS
from tests.support.torchrun import Torchrun, await_file
from tests.support.warm import WarmProcess

TORCHRUN_PATIENCE_SECONDS = 30
GONE_SECONDS = 15  # all ranks must be gone so long after one has died


@pytest.fixture(scope="module")
def shop(straight_shop: Workshop) -> Workshop:
    return straight_shop


@pytest.fixture(scope="module")
def straight(straight_shop: Workshop) -> Path:
    return straight_shop.runs / "straight"


def assert_stopped(run: Path, result: Result, number: signal.Signals) -> int:
    """Assert that one line says how to continue, and that one checkpoint is of the last step done. Return that step."""
    (line,) = result.error_lines
    assert line.startswith(f"stopped by {number.name} after global step ")
    assert "to continue, run the same command again" in line
    last = int(line.partition("after global step ")[2].partition(";")[0])
    made = list_checkpoints(run / "checkpoints")
    assert [step for step, _ in made if step >= last] == [last]
    assert (run / "checkpoints" / "latest").resolve() == made[-1][1].resolve()
    assert not list((run / "checkpoints").glob(".*"))
    # All other checkpoints were due. A stop adds no others, even if it comes while one is being written.
    assert [step for step, _ in made if step != last] == list(range(0, last, SETTINGS["validation_interval"]))
    return last


# Places where a rank can be when a signal comes, and the ranks that get there. All are at step 6, which has a
# validation and a save.
IN_BACKWARD = "in_gradients(lambda gradient: {action}(), rank={rank}, steps=range(6, 7))"
PLACES = {
    "STEP": (0, 1),
    "FORWARD": (0, 1),
    "in the backward pass": (0, 1),
    "UPDATE": (0, 1),
    "VALIDATION": (0, 1),
    "EVALUATION": (0,),
    "SAVE": (0, 1),
    "WRITE": (0,),
    "SYNC": (0,),
    "METRICS": (0,),
}


def acting_at(place: str, rank: int, action: str) -> str:
    """Return the prelude with which a rank runs `action` at a place."""
    if place == "in the backward pass":
        return FAULTS + IN_BACKWARD.format(action=action, rank=rank)
    return FAULTS + f"before({place}, {action}, rank={rank}, step=6, call=1)"


@pytest.mark.timeout(900)
@pytest.mark.fault(
    "a rank is told to stop", "in ten places: all ranks stop after the same step, with one checkpoint; the same end"
)
def test_told_anywhere(shop: Workshop, straight: Path, exhaustive: bool) -> None:
    """If one rank alone gets a signal, all ranks stop after the same step."""
    signals = [signal.SIGTERM, signal.SIGINT]
    cases = [(place, rank, number) for place, ranks in PLACES.items() for rank in ranks for number in signals]
    cases = cases if exhaustive else cases[::3]

    def stop(case: tuple[str, int, signal.Signals]) -> None:
        place, rank, told = case
        run = shop.add_run(f"told-{cases.index(case)}", **SETTINGS)
        prelude = acting_at(place, rank, f"tell({int(told)})")
        result = shop.train(run.name, prelude=prelude, expect=128 + told)
        assert assert_stopped(run, result, told) == 6, place  # its validation and its save look for signals
        shop.train(run.name, prelude=FAULTS)
        assert_same_end(straight, run)

    for_each(cases, stop, at_once=3)  # the ranks wait for each other more than they compute


@pytest.mark.slow
@pytest.mark.fault("told to stop in steps that take long", "stops after that step and no other")
def test_long_steps(shop: Workshop, straight: Path) -> None:
    """If steps are long, a run stops after the current one, because one more could take longer than torchrun waits."""
    run = shop.add_run("long", **SETTINGS)
    slow = "import harness.distributed.signals as s\ns.LONG_STEP_SECONDS = 1\n"
    slow += "before(FORWARD, lambda: pause(0.6)() if 2 <= Now.step <= 4 else None)\n"  # two microbatches a step
    result = shop.train("long", prelude=FAULTS + slow + "before(UPDATE, tell(SIGTERM), rank=1, step=4)", expect=143)
    assert assert_stopped(run, result, signal.SIGTERM) == 4
    shop.train("long", prelude=FAULTS)
    assert_same_end(straight, run)


@pytest.mark.fault("hundreds of signals", "one orderly stop; the handler calls no function")
def test_many_signals(shop: Workshop, straight: Path) -> None:
    """The signal handler calls no function. If it called a collective inside another collective, both ranks would hang,
    or exchange wrong values."""
    run, notes = shop.add_run("many", **SETTINGS), shop.path / "handlers"
    notes.mkdir()
    storm = f"record_handler({str(notes)!r})\nbefore(STEP, lambda: signal_storm(SIGTERM, 200), step=5)\n"
    result = shop.train("many", prelude=FAULTS + storm, expect=128 + signal.SIGTERM)
    assert_stopped(run, result, signal.SIGTERM)
    handled = [json.loads(path.read_text()) for path in notes.iterdir()]
    assert len(handled) == 2
    assert all(rank["runs"] > 5 for rank in handled), handled  # signals that come together are handled once
    assert all(rank["called"] == [] for rank in handled), handled
    shop.train("many", prelude=FAULTS)
    assert_same_end(straight, run)


# The real torchrun


# Work during which a signal comes. The prelude makes it long, by `before` with these arguments.
LONG_WORK = {
    "step": "STEP, {noted}, step=5",
    "validation": "EVALUATION, {noted}, step=6",
    "save": "WRITE, {noted}, step=6",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.fault(
    "torchrun is told to stop", "one checkpoint, and all are gone before torchrun kills; continued to the same end"
)
def test_torchrun_told(shop: Workshop, straight: Path, exhaustive: bool) -> None:
    signals = [signal.SIGTERM, signal.SIGINT]
    few = [("save", signal.SIGTERM, False), ("validation", signal.SIGINT, True)]
    cases = [*itertools.product(LONG_WORK, signals, (False, True))] if exhaustive else few

    def tell(case: tuple[str, signal.Signals, bool]) -> float:
        place, told, by_processes = case
        run = shop.add_run(f"{'processes' if by_processes else 'torchrun'}-{place}-{told.name}", **SETTINGS)
        mark = shop.path / f"{run.name}.mark"
        work = LONG_WORK[place].format(noted=f"note({str(mark)!r}, pause(5))")
        job = Torchrun(shop, run, are_forked=True, by_processes=by_processes)
        process = job.start(f"before({work}, rank=0, call=1)")
        await_file(mark, process)
        began = time.monotonic()
        # Ctrl-C in a terminal also reaches the launcher alone, because its ranks have their own sessions.
        os.kill(process.pid, told)
        result = finish([process], expect=128 + told if by_processes else 1, timeout=60)
        seconds = time.monotonic() - began
        assert_stopped(run, result, told)
        shop.train(run.name, prelude=FAULTS)
        assert_same_end(straight, run)
        return seconds

    slowest = max(for_each(cases, tell, at_once=3))
    assert slowest < TORCHRUN_PATIENCE_SECONDS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.fault(
    "torchrun is told to stop in a download", "all are gone at once; the same command downloads and trains"
)
def test_torchrun_told_in_a_download(tmp_path: Path, exhaustive: bool) -> None:
    signals = [signal.SIGTERM, signal.SIGINT] if exhaustive else [signal.SIGINT]
    slowest = 0.0
    for told, by_processes in itertools.product(signals, (False, True)):
        with FakeHub() as hub:
            dataset = hub.add_dataset(NAME, corpus())
            dataset.files["train.safetensors"].delay_seconds = 60
            shop = Workshop(
                tmp_path / f"{told.name}-{by_processes}", hub.environment(tmp_path / "hf") | {"HF_HUB_OFFLINE": "0"}
            )
            run = shop.add_run(dataset=NAME, min_train_tokens=256)
            process = Torchrun(shop, run, are_forked=True, by_processes=by_processes).start("")
            while not any(file.downloads for file in dataset.files.values() if file.delay_seconds):
                assert process.poll() is None, process.communicate(timeout=1)
                time.sleep(0.02)
            began = time.monotonic()
            os.kill(process.pid, told)
            result = finish([process], expect=128 + told if by_processes else 1, timeout=60)
            slowest = max(slowest, time.monotonic() - began)
            assert len(result.error_lines) == 1, (told, by_processes, result)
            (line,) = result.error_lines
            assert line.startswith(f'stopped: dataset "{NAME}"')
            assert "again" in line
            hub.release()
            shop.train("r", prelude=FAULTS)
    assert slowest < TORCHRUN_PATIENCE_SECONDS


# Ranks that die


@dataclass(frozen=True)
class End:
    """End of a rank, `seconds` after the fault."""

    status: int
    seconds: float
    stderr: str


def ends_of(processes: Sequence[WarmProcess], mark: Path, *, as_torchrun: bool) -> list[End]:
    """Wait for all ranks, and return their ends. With `as_torchrun`, the other ranks are told to end once one has
    failed, as torchrun does."""
    deadline = time.monotonic() + 60
    while any(process.poll() is None for process in processes):
        if as_torchrun and any(process.poll() for process in processes):
            for process in processes:
                process.terminate()
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    stuck = [process.pid for process in processes if process.poll() is None]
    for process in processes:
        process.kill()
    errors = [process.communicate(timeout=10)[1] for process in processes]
    assert not stuck, errors
    fault = float(mark.read_text())
    times = [process.base.with_suffix(".status").stat().st_mtime - fault for process in processes]
    return [
        End(process.returncode or 0, seconds, text)
        for process, seconds, text in zip(processes, times, errors, strict=True)
    ]


@dataclass(frozen=True)
class Death:
    """Death of one of `ranks` ranks, which kills itself or raises an error at a place."""

    place: str
    rank: int
    ranks: int
    action: str
    as_torchrun: bool


# At these places the ranks have not met yet, so that only torchrun can tell them of another's end.
EARLY_PLACES = ["START", "CHECK"]
DEADLY = {**PLACES, "WARM_UP": (0, 1)}


def all_deaths() -> Iterator[Death]:
    for place, ranks in DEADLY.items():
        for rank, action, as_torchrun in itertools.product(ranks, ("kill", "fail"), (True, False)):
            yield Death(place, rank, 2, action, as_torchrun)
    for place, rank, action in itertools.product(EARLY_PLACES, (0, 1), ("kill", "fail")):
        yield Death(place, rank, 2, action, as_torchrun=True)
    for rank, action, as_torchrun in itertools.product((0, 2), ("kill", "fail"), (True, False)):
        yield Death("FORWARD", rank, 3, action, as_torchrun)


def die(shop: Workshop, number: int, death: Death) -> float:
    """Let a rank die. Return the seconds until the last process was gone."""
    run, mark = shop.add_run(f"death-{number}", **SETTINGS), shop.path / f"death-{number}"
    action = f"note({str(mark)!r}, {death.action})"
    prelude = acting_at(death.place, death.rank, action)
    if death.place in {"WARM_UP", *EARLY_PLACES}:
        prelude = FAULTS + f"before({death.place}, {action}, rank={death.rank}, call=1)"
    processes = shop.start(run.name, ranks=death.ranks, prelude=prelude)
    warm = [process for process in processes if isinstance(process, WarmProcess)]
    ends = ends_of(warm, mark, as_torchrun=death.as_torchrun)
    assert all(end.status != 0 for end in ends), (death, ends)
    own = ends.pop(death.rank)
    assert "Traceback" not in "".join(end.stderr for end in ends), (death, ends)
    if death.action == "fail":
        assert "an injected failure" in own.stderr, death
    lines = [line for end in ends for line in end.stderr.splitlines() if line.startswith(("error:", "stopped"))]
    if death.as_torchrun:  # torchrun reports a kill itself, and no line may hide the first error
        assert not lines, (death, lines)
    else:
        (line,) = lines
        assert line.startswith(f"error: rank {death.rank} ("), (death, line)
        assert "ended suddenly; run the same command again to continue" in line
    return max(end.seconds for end in [own, *ends])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.fault(
    "a rank dies", "the first error is the one shown, all ranks are gone in 15 s; continued to the same end"
)
def test_a_rank_dies(shop: Workshop, straight: Path, exhaustive: bool) -> None:
    deaths = list(all_deaths())
    if not exhaustive:
        deaths = deaths[::6]
    with ThreadPoolExecutor(6) as pool:  # the ranks wait more than they compute
        seconds = list(pool.map(lambda case: die(shop, *case), enumerate(deaths)))
    assert max(seconds) < GONE_SECONDS

    def go_on(number: int) -> None:
        shop.train(f"death-{number}", ranks=2, prelude=FAULTS)
        if deaths[number].ranks == 2:
            assert_same_end(straight, shop.runs / f"death-{number}")

    for_each(range(0, len(deaths), 1 if exhaustive else 4), go_on, at_once=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.fault("a rank dies under torchrun --max-restarts=3", "comes back from latest by itself, to the same end")
def test_torchrun_restarts(shop: Workshop, straight: Path, exhaustive: bool) -> None:
    """Restarted ranks resume from `latest`. --restart or a CHECKPOINT is obeyed only once."""
    cases = [["--restart"], [], ["CHECKPOINT"]] if exhaustive else [["--restart"]]
    deaths = [(1, 5), (0, 8)] if exhaustive else [(1, 5)]

    def restart(case: tuple[int, list[str]]) -> None:
        number, asked = case
        run = shop.add_run(f"restarts-{number}", **SETTINGS)
        if asked:
            shop.train(run.name, prelude=FAULTS)
        arguments = asked
        if asked == ["CHECKPOINT"]:
            arguments = [list_checkpoints(run / "checkpoints")[1][1].name]
        die_in_lives(shop, run, deaths, arguments)
        assert_same_end(straight, run)
        assert len(list(run.glob("aside/*/checkpoints"))) == len(asked)  # --restart or the CHECKPOINT was obeyed once

    for_each(enumerate(cases), restart, at_once=3)


def die_in_lives(shop: Workshop, run: Path, deaths: Sequence[tuple[int, int]], arguments: Sequence[str]) -> None:
    """Run torchrun to the job's end. In each of the job's first lives, one rank dies at a step; `deaths` has a rank and
    a step for each."""
    lives = shop.path / f"{run.name}.lives"
    prelude = "".join(
        f"before(STEP, in_life({life}, {str(lives)!r}, kill), rank={rank}, step={step})\n"
        for life, (rank, step) in enumerate(deaths, 1)
    )
    process = Torchrun(shop, run, are_forked=True).start(prelude, "--max-restarts=3", arguments=arguments)
    result = finish([process], expect=0, timeout=280)
    asked_back = bool(arguments) and arguments != ["--restart"]
    assert result.stdout.count("continuing from") == len(deaths) + asked_back, result.stdout
    # Each life resumes from the newest checkpoint before the death. Every third step has a checkpoint.
    found = [line.partition("-iteration-")[2].partition(",")[0] for line in result.stdout.splitlines()]
    continued = [int(step) for step in found if step]
    assert continued[-len(deaths) :] == [(step - 1) // 3 * 3 for _, step in deaths]
