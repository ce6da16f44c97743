"""A run whose training loss diverges ends with a checkpoint. Spikes, noise and plateaus do not end it."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.comparison.records import RunRecord
from harness.runs.checkpoint_meta import TrainState, read_meta, write_meta
from harness.runs.directory import RunDirectory
from harness.runs.summary import read_summary
from harness.sweeps.derived_runs import write_runs
from tests.support.in_process import InProcess
from tests.support.launch import metrics
from tests.support.same_end import assert_same_end
from tests.support.straight import FAULTS
from tests.support.sweeping import load, sweep_command

TOTAL, INTERVAL, PATIENCE = 10_000, 10, 50


def falling(step: float) -> float:
    """Return the loss at a step of a run like GPT-2's: from 13 to 3.3 nats."""
    return 3.3 + 7.5 * math.exp(-step / 300) + 2 * math.exp(-step / 2000)


def from_5000(loss: Callable[[float], float]) -> Callable[[float], float]:
    """Return a curve that falls for half of the run, and is then `loss(step)`."""
    return lambda step: falling(step) if step < 5000 else loss(step)


def spike(height: float, steps: float) -> Callable[[float], float]:
    """Return a curve with a spike at step 5,000 that decays by a factor of e in `steps`."""
    return from_5000(lambda step: falling(step) + height * math.exp((5000 - step) / steps))


def stops_at(curve: Callable[[float], float], noise: float, **validation: Any) -> int | None:
    """Return the global step at which the rule ends a run of 10,000 steps with this training loss, or None."""
    draws, state = random.Random(0), TrainState()
    for step in range(0, TOTAL, INTERVAL):
        state.global_step = step
        state.add_report(curve(step) + draws.gauss(0, noise), 1, 0)
        state.follow_level(patience=PATIENCE, interval=INTERVAL)
        if validation and step % 1000 == 0:
            state.val_loss = validation["loss"](step)
            if validation.get("saves", True):
                state.record_if_best(state.val_loss)
        if state.has_diverged:
            return step
    return None


@pytest.mark.parametrize(
    ("curve", "noise"),
    [
        (falling, 0.03),
        (falling, 0.5),
        (spike(7, 100), 0.05),
        (spike(3, 200), 0.05),
        (from_5000(lambda step: 1e6 if step == 5000 else falling(step)), 0.05),
        (from_5000(lambda step: math.nan if step < 5100 else falling(step)), 0.05),
        (from_5000(lambda step: falling(step) + 0.4), 0.05),  # a higher learning rate
        (lambda step: math.log(50257), 0.02),  # never learns
        (lambda step: max(7.5, falling(step)), 0.05),  # learns the frequency of tokens only
    ],
)
def test_curves_that_recover_or_never_fell_go_on(curve: Callable[[float], float], noise: float) -> None:
    assert stops_at(curve, noise) is None


@pytest.mark.parametrize("noise", [0.02, 0.5])
@pytest.mark.parametrize(
    "loss",
    [
        lambda step: falling(5000) + 1,
        lambda step: math.log(50257),
        lambda step: math.nan,
        lambda step: math.inf,
        lambda step: 40.0,
    ],
)
def test_curves_that_do_not_recover_end(loss: Callable[[float], float], noise: float) -> None:
    """The run ends when the loss has been too high for 5 % of the steps, and as many reports as it takes to see it."""
    step = stops_at(from_5000(loss), noise)
    assert step is not None
    assert 5500 <= step <= 5800


def test_text_that_becomes_harder_ends_no_run_that_improves() -> None:
    harder = from_5000(lambda step: falling(step) + 1.5)
    assert stops_at(harder, 0.05) is not None
    assert stops_at(harder, 0.05, loss=falling) is None
    assert stops_at(harder, 0.05, loss=from_5000(lambda step: falling(step) if step < 6001 else 6.0)) == 7010
    assert stops_at(from_5000(lambda step: math.nan), 0.05, loss=from_5000(lambda step: math.nan)) is not None
    assert stops_at(harder, 0.05, loss=falling, saves=False) is None, "without a checkpoint no loss is the best"
    rising = from_5000(lambda step: falling(5000) + 2)
    assert stops_at(harder, 0.05, loss=rising, saves=False) is not None


# A learning rate that rises far too high, in a warm-up that is longer than the run.
RISING: dict[str, Any] = {
    "min_train_tokens": 64 * 160,
    "learning_rate": 1.0,
    "warmup_steps": 160,
    "report_interval": 1,
    "validation_interval": 25,
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    made = InProcess(tmp_path_factory.mktemp("divergence"))
    made.add_dataset(tokens=60_000)
    made.add_run("to-the-end", **RISING, stop_if_diverged=False)
    made.train_here("to-the-end")
    made.add_run("ended", **RISING)
    made.train_here("ended", expect=4)
    return made


def copy_of_ended(shop: InProcess, name: str) -> Path:
    return Path(shutil.copytree(shop.runs / "ended", shop.runs / name, symlinks=True))


@pytest.mark.fault("a loss that has long been far above its lowest", "ends with a checkpoint and exit status 4")
def test_a_run_that_diverges_ends_with_a_checkpoint(shop: InProcess) -> None:
    run = shop.runs / "ended"
    again = copy_of_ended(shop, "again")
    last = metrics(run)[-1]["global_step"]
    assert (run / "checkpoints" / "latest").resolve().name.endswith(f"-iteration-{last}")
    best = min(metrics(run, "validation"), key=lambda each: each["loss"])
    assert (run / "checkpoints" / "best").resolve().name.endswith(f"-iteration-{best['global_step']}")
    assert RunRecord.read(RunDirectory(run)).state.word == "diverged"
    repeated = shop.train_here("again", expect=4)
    cause = "stop_if_diverged (the training loss has been far above its lowest value since about step"
    assert f"stopped by {cause}" in repeated.stderr
    assert metrics(again)[-1]["global_step"] == last + 1, "the same command spends no more than a step"


@pytest.mark.slow
def test_reports_of_validations_alone_suffice(shop: InProcess) -> None:
    """Two ranks end together, with a checkpoint."""
    rare = {"min_train_tokens": 2 * RISING["min_train_tokens"], "report_interval": 200, "validation_interval": 2}
    shop.add_run("rare", **RISING | rare)
    shop.train("rare", expect=4)
    assert RunRecord.read(RunDirectory(shop.runs / "rare")).state.word == "diverged"


def test_it_ends_at_once_if_only_a_validation_was_interrupted(shop: InProcess) -> None:
    run = copy_of_ended(shop, "validated")
    latest, last = (run / "checkpoints" / "latest").resolve(), metrics(run)[-1]["global_step"]
    write_meta(latest, read_meta(latest).model_copy(update={"validation_due": True}))
    shop.add_run("validated", **RISING | {"validation_interval": last})
    shop.train_here("validated", expect=4)
    assert metrics(run)[-1]["global_step"] == last


def test_a_sweep_takes_it_as_a_result(shop: InProcess) -> None:
    """No run is started, and the sweep is at its end."""
    shop.add_run("base", **RISING)
    made = load(shop, vary={"random_seed": [1]})
    write_runs(made.missing())
    shutil.copytree(shop.runs / "ended" / "checkpoints", shop.runs / "s-seed1" / "checkpoints", symlinks=True)
    assert "1 diverged already" in sweep_command(shop, "plan", str(shop.datasets)).stdout
    done = sweep_command(shop, "run", str(shop.datasets))
    assert (done.status, done.stderr) == (0, "")
    assert "1 diverged" in done.stdout
    assert not (shop.runs / "s-seed1" / "sweep.log").exists()


def test_it_continues_to_the_same_end_if_that_is_asked_for(shop: InProcess) -> None:
    run = copy_of_ended(shop, "continued")
    shop.add_run("continued", **RISING, stop_if_diverged=False)
    shop.train_here("continued")
    assert_same_end(shop.runs / "to-the-end", run)
    assert read_summary(run / "summary.json").has_diverged


@pytest.mark.slow
def test_a_stop_before_the_end_changes_nothing(shop: InProcess) -> None:
    """The level is part of a checkpoint: a run that was stopped twice ends at the same step."""
    of_two_ranks = RISING | {"min_train_tokens": 2 * RISING["min_train_tokens"]}
    straight, run = (shop.add_run(name, **of_two_ranks) for name in ("straight", "interrupted"))
    shop.train("straight", expect=4)
    for step in (40, metrics(straight)[-1]["global_step"] - 5):
        shop.train("interrupted", prelude=f"{FAULTS}before(STEP, tell(SIGTERM), step={step})", expect=143)
    shop.train("interrupted", expect=4)
    assert_same_end(straight, run)
