"""Signals, and ranks that die or are stuck.

torchrun and schedulers send SIGTERM, Ctrl-C sends SIGINT. torchrun sends SIGKILL 30 seconds later.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.runs.checkpoints import list_checkpoints
from tests.support.fake_hub import CORPUS, FakeHub, corpus
from tests.support.jobs import for_each
from tests.support.launch import Result, Workshop, finish, wait_until
from tests.support.same_end import assert_same_end
from tests.support.straight import FAULTS, SETTINGS
from tests.support.torchrun import Torchrun

TORCHRUN_PATIENCE_SECONDS = 30
GONE_SECONDS = 15  # all ranks must be gone so long after one has died


@pytest.fixture(scope="module")
def shop(straight_shop: Workshop) -> Workshop:
    return straight_shop


def assert_stopped(run: Path, result: Result, number: signal.Signals, interval: int) -> int:
    """Assert that one line says how to continue, and that exactly one checkpoint is of the last completed step. Return
    that step."""
    (line,) = result.error_lines
    assert line.startswith(f"stopped by {number.name} after global step ")
    assert "to continue, run the same command again" in line
    last = int(line.partition("after global step ")[2].partition(";")[0])
    made = list_checkpoints(run / "checkpoints")
    assert [step for step, _ in made if step >= last] == [last]
    assert (run / "checkpoints" / "latest").resolve() == made[-1][1].resolve()
    assert not list((run / "checkpoints").glob(".*"))
    # All other checkpoints were due. A stop adds no others, even if it comes while one is being written.
    assert {step for step, _ in made} == {*range(0, last, interval), last}
    return last


SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Places where a rank can be when a signal comes, and the ranks that get there.
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


OTHER_PLACES = {
    "between two steps": "before(BETWEEN_STEPS, {action}, rank={rank}, call=1)",
    "in the backward pass": "in_gradients(lambda gradient: {action}(), rank={rank}, steps=[{step}])",
    "in the first exchange": "before('harness.training.step:OptimizerStep.accumulate', {action}, rank={rank}, call=1)",
    "in the evaluation": "after_first_evaluated({action}, step={step})",  # of the second microbatch
    **dict.fromkeys(("WARM_UP", "START", "CHECK"), "before({place}, {action}, rank={rank}, call=1)"),
}


def acting_at(place: str, rank: int, action: str, step: int) -> str:
    """Return Python source that makes a rank run `action` at a place in the program."""
    text = OTHER_PLACES.get(place, "before({place}, {action}, rank={rank}, step={step}, call=1)")
    return FAULTS + text.format(place=place, rank=rank, action=action, step=step)


@pytest.mark.slow
@pytest.mark.fault(
    "a rank is told to stop",
    "at ten places: all ranks stop after the same step; resumed to the same end",
)
@pytest.mark.fault("stopped after each step", "each process trains one step, and the last one reaches the same end")
def test_told_anywhere(shop: Workshop, exhaustive: bool) -> None:
    """If one rank alone gets a signal, all ranks stop after the same step, wherever in the step that rank is. In these
    runs each process does a single step, and the next process resumes the run. Each process gets the signal at another
    place."""
    settings = SETTINGS | {"precision": "fp16", "validation_interval": 1, "report_interval": 3}
    lively = FAULTS + "lively_scaler()\n"
    unstopped = shop.add_run("not-told", **settings)
    shop.train("not-told", prelude=lively)

    def stop_at_each_step(shift: int) -> None:
        run = shop.add_run(f"told-{shift}", **settings)
        for step, (place, ranks) in enumerate([*PLACES.items(), *[("between two steps", (0,))] * 2]):
            rank, told = ranks[(step + shift) % len(ranks)], SIGNALS[(step + shift) // 2 % 2]
            prelude = lively + acting_at(place, rank, f"tell({int(told)})", step)
            result = shop.train(run.name, prelude=prelude, expect=128 + told)
            assert assert_stopped(run, result, told, 1) == step, place  # the validation and the save look for signals
        shop.train(run.name, prelude=lively)
        assert_same_end(unstopped, run)

    for_each(range(4) if exhaustive else [0], stop_at_each_step)


@pytest.mark.slow
@pytest.mark.fault("told to stop during a long step", "stops after that step, and starts no other")
def test_long_steps(shop: Workshop) -> None:
    """If steps are long, a run stops after the current one, because one more could take longer than torchrun waits."""
    run = shop.add_run("long", **SETTINGS)
    slow = "import harness.distributed.signals as s\ns.LONG_STEP_SECONDS = 1\n"
    slow += "before(FORWARD, lambda: pause(0.6)() if 2 <= Now.step <= 4 else None)\n"  # two microbatches a step
    result = shop.train("long", prelude=FAULTS + slow + "before(UPDATE, tell(SIGTERM), rank=1, step=4)", expect=143)
    assert assert_stopped(run, result, signal.SIGTERM, SETTINGS["validation_interval"]) == 4


@pytest.mark.slow
@pytest.mark.fault("hundreds of signals", "one orderly stop; the handler calls no function")
def test_many_signals(shop: Workshop, straight: Path) -> None:
    """The signal handler calls no function. If it called a collective inside another collective, both ranks would hang,
    or exchange wrong values."""
    run, notes = shop.add_run("many", **SETTINGS), shop.path / "handlers"
    notes.mkdir()
    storm = f"record_handler({str(notes)!r})\nbefore(STEP, lambda: signal_storm(SIGTERM, 200), step=5)\n"
    result = shop.train("many", prelude=FAULTS + storm, expect=128 + signal.SIGTERM)
    assert_stopped(run, result, signal.SIGTERM, SETTINGS["validation_interval"])
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
@pytest.mark.fault(
    "torchrun is told to stop", "one checkpoint; all ranks end before torchrun would kill them; resumed to the same end"
)
def test_torchrun_told(shop: Workshop, straight: Path, exhaustive: bool) -> None:
    few = [("save", signal.SIGTERM, False), ("validation", signal.SIGINT, True)]
    cases = [*itertools.product(LONG_WORK, SIGNALS, (False, True))] if exhaustive else few

    def tell(case: tuple[str, signal.Signals, bool]) -> None:
        place, told, by_processes = case
        run = shop.add_run(f"{'processes' if by_processes else 'torchrun'}-{place}-{told.name}", **SETTINGS)
        mark = shop.path / f"{run.name}.mark"
        work = LONG_WORK[place].format(noted=f"note({str(mark)!r}, pause(5))")
        job = Torchrun(shop, run, are_forked=True, by_processes=by_processes)
        process = job.start(f"before({work}, rank=0, call=1)")
        wait_until(mark.exists, process)
        began = time.monotonic()
        # Ctrl-C in a terminal also reaches the launcher alone, because its ranks have their own sessions.
        os.kill(process.pid, told)
        result = finish([process], expect=128 + told if by_processes else 1, timeout=60)
        assert time.monotonic() - began < TORCHRUN_PATIENCE_SECONDS
        assert_stopped(run, result, told, SETTINGS["validation_interval"])
        shop.train(run.name, prelude=FAULTS)
        assert_same_end(straight, run)

    for_each(cases, tell, at_once=3)


@pytest.mark.fault("a rank is told to stop under torchrun --max-restarts=2", "the run stops; no rank is started again")
def test_a_stop_under_torchrun_is_final(shop: Workshop) -> None:
    run = shop.add_run("final", **SETTINGS)
    job = Torchrun(shop, run, are_forked=True)
    told = f"before(STEP, tell({signal.SIGTERM:d}), rank=1, step=2)"
    result = finish([job.start(told, "--max-restarts=2")], expect=1, timeout=240)
    assert_stopped(run, result, signal.SIGTERM, SETTINGS["validation_interval"])
    assert result.stdout.count("starting 2 processes") == 1


@pytest.mark.slow
@pytest.mark.fault(
    "torchrun is told to stop, or killed, during a download", "all ranks end; the same command then trains"
)
def test_torchrun_told_in_a_download(tmp_path: Path, exhaustive: bool) -> None:
    signals = [*SIGNALS, signal.SIGKILL] if exhaustive else [signal.SIGINT]
    for told, by_processes in itertools.product(signals, (False, True)):
        with FakeHub() as hub:
            dataset = hub.add_dataset(CORPUS, corpus())
            dataset.files["train.safetensors"].delay_seconds = 60
            shop = Workshop(tmp_path / f"{told.name}-{by_processes}", hub.environment(tmp_path / "hf"))
            run = shop.add_run(dataset=CORPUS, min_train_tokens=256)
            job = Torchrun(shop, run, are_forked=told != signal.SIGKILL, by_processes=by_processes)
            process = job.start("")
            wait_until(lambda: dataset.files["train.safetensors"].downloads, process)  # noqa: B023
            began = time.monotonic()
            os.kill(process.pid, told)
            if told == signal.SIGKILL:
                job.seconds_to_the_end(GONE_SECONDS)
            else:
                result = finish([process], expect=128 + told if by_processes else 1, timeout=60)
                line, *more = result.error_lines
                # run_ranks says this if it first sees the end of rank 1, which has only waited for the download.
                launchers = f"stopped by {told.name}; to continue, run the same command again"
                assert not more or (by_processes and more == [launchers])
                assert line.startswith(f'stopped: dataset "{CORPUS}"')
                assert "again" in line
            assert time.monotonic() - began < TORCHRUN_PATIENCE_SECONDS
            hub.released.set()
            shop.train("r", prelude=FAULTS)


# Ranks that die or are stuck

STUCK = ("freeze", "pause(1000)", "spin")


@dataclass(frozen=True)
class Loss:
    """Failure of one of `ranks` ranks. At a place in the program, this rank kills itself, raises an error or gets
    stuck. With `as_torchrun`, the other ranks are told to end once one has failed, as torchrun does."""

    place: str
    rank: int
    ranks: int
    action: str
    as_torchrun: bool = False


def all_deaths() -> Iterator[Loss]:
    for place, ranks in {**PLACES, "WARM_UP": (0, 1)}.items():
        for rank, action, as_torchrun in itertools.product(ranks, ("kill", "fail"), (True, False)):
            yield Loss(place, rank, 2, action, as_torchrun)
    # At these places the ranks have not met yet, so that only torchrun can tell them of another's end.
    for place, rank, action in itertools.product(("START", "CHECK"), (0, 1), ("kill", "fail")):
        yield Loss(place, rank, 2, action, as_torchrun=True)
    for rank, action, as_torchrun in itertools.product((0, 2), ("kill", "fail"), (True, False)):
        yield Loss("FORWARD", rank, 3, action, as_torchrun)


STUCK_PLACES = {
    **dict.fromkeys(("FORWARD", "in the backward pass", "UPDATE"), (0, 1)),
    "in the evaluation": (0,),
    "'harness.data.dataset:TokenFile.read'": (1,),
    "in the first exchange": (1,),
}


def all_stuck() -> Iterator[Loss]:
    for place, ranks in STUCK_PLACES.items():
        for rank, action in itertools.product(ranks, STUCK):
            yield Loss(place, rank, 2, action)
    for rank, action in itertools.product((0, 2), STUCK):
        yield Loss("FORWARD", rank, 3, action)
    yield Loss("in the backward pass", 1, 3, "pause(1000)")
    yield Loss("in the evaluation", 0, 3, "pause(1000)")


def lose(shop: Workshop, number: int, loss: Loss) -> None:
    """Make a rank fail in the way of `loss`, and assert that all ranks end within GONE_SECONDS, with the right
    message."""
    run, mark = shop.add_run(f"lost-{number}", **SETTINGS), shop.path / f"lost-{number}"
    action = f"note({str(mark)!r}, {loss.action})"
    processes = shop.start(run.name, ranks=loss.ranks, prelude=acting_at(loss.place, loss.rank, action, 6))
    # A frozen rank cannot end itself. The launcher kills it.
    awaited = [each for rank, each in enumerate(processes) if (rank, loss.action) != (loss.rank, "freeze")]
    deadline = time.monotonic() + 60
    while any(process.poll() is None for process in awaited) and time.monotonic() < deadline:
        if loss.as_torchrun and any(process.poll() for process in processes):
            for process in processes:
                process.terminate()
        time.sleep(0.02)
    seconds = time.time() - float(mark.read_text())
    for process in processes:
        process.kill()
    errors = [process.communicate(timeout=10)[1] for process in processes]
    assert seconds < GONE_SECONDS, (loss, errors)
    assert all(process.returncode != 0 for process in processes), (loss, errors)
    own, others = errors.pop(loss.rank), "".join(errors)
    assert "Traceback" not in others, (loss, others)
    assert ("an injected failure" in own) == (loss.action == "fail"), (loss, own)
    lines = [line for line in others.splitlines() if line.startswith(("error:", "stopped"))]
    if loss.as_torchrun:  # torchrun reports a kill itself, and no line may hide the first error
        assert not lines, (loss, lines)
    else:
        (line,) = lines
        assert line.startswith(f"error: rank {loss.rank} ("), (loss, line)
        assert "run the same command again to continue" in line
        assert ("ended suddenly" in line) == (loss.action not in STUCK), (loss, line)
        assert loss.action not in STUCK or "error:" not in own, (loss, own)


@pytest.mark.slow
@pytest.mark.fault("a rank dies", "the first error is shown; all ranks end within 15 s; resumed to the same end")
@pytest.mark.fault(
    "a rank is stuck", "frozen, asleep or busy: one line names it; all but a frozen one end; resumed to the same end"
)
@pytest.mark.parametrize("stuck", [False, True])
def test_a_rank_is_lost(shop: Workshop, tmp_path: Path, straight: Path, stuck: bool, exhaustive: bool) -> None:
    own = Workshop(tmp_path, {"COLLECTIVE_TIMEOUT_SECONDS": "3"} if stuck else {})
    own.datasets.symlink_to(shop.datasets)
    losses = list(all_stuck() if stuck else all_deaths())
    losses = losses if exhaustive else losses[3::7] if stuck else losses[::11]
    for_each(enumerate(losses), lambda case: lose(own, *case), at_once=6)  # the ranks wait more than they compute

    def resume(number: int) -> None:
        own.train(f"lost-{number}", prelude=FAULTS)
        assert_same_end(straight, own.runs / f"lost-{number}")

    resumed = [number for number, loss in enumerate(losses) if loss.ranks == 2]
    for_each(resumed if exhaustive else resumed[::4], resume, at_once=4)


@pytest.mark.slow
@pytest.mark.fault(
    "a rank dies under torchrun --max-restarts=3",
    "ranks resume by themselves from latest; --restart is obeyed once",
)
def test_torchrun_restarts(shop: Workshop, straight: Path, exhaustive: bool) -> None:
    """Restarted ranks resume from `latest`. --restart or a CHECKPOINT is obeyed only once."""
    # In each of a job's first lives, one rank dies at a step.
    deaths = [(1, 5), (0, 8)] if exhaustive else [(1, 5)]

    def restart(asked: str) -> None:
        run = Path(shutil.copytree(straight, shop.runs / f"restarts-{asked}", symlinks=True))
        lives = shop.path / f"{run.name}.lives"
        prelude = "".join(
            f"before(STEP, in_life({life}, {str(lives)!r}, kill), rank={rank}, step={step})\n"
            for life, (rank, step) in enumerate(deaths, 1)
        )
        argument = list_checkpoints(run / "checkpoints")[1][1].name if asked == "checkpoint" else asked
        process = Torchrun(shop, run, are_forked=True).start(prelude, "--max-restarts=3", arguments=[argument])
        result = finish([process], expect=0, timeout=280)
        assert result.stdout.count("continuing from") == len(deaths) + (asked == "checkpoint"), result.stdout
        # Each life resumes from the newest checkpoint before the death. Every third step has a checkpoint.
        found = [line.partition("-iteration-")[2].partition(",")[0] for line in result.stdout.splitlines()]
        continued = [int(step) for step in found if step]
        assert continued[-len(deaths) :] == [(step - 1) // 3 * 3 for _, step in deaths]
        assert_same_end(straight, run)
        assert len(list(run.glob("aside/*/checkpoints"))) == 1  # --restart or the CHECKPOINT was obeyed once

    for_each(["--restart", "checkpoint"], restart, at_once=2)
