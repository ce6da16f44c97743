"""Searches: what Optuna answers against Optuna's own study and plain arithmetic; runs that are made, given up, killed
and gone on with. Most have a program in ddp_train.py's place whose loss is a function of the settings.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.common.json_files import read_json_object
from harness.sweeps import run as sweep_run
from harness.sweeps.file import Pruning
from harness.sweeps.plan import AssumedSpeed, MachineUse, Planner
from harness.sweeps.run import STOPPING_SIGNALS, Ends
from harness.sweeps.space import Choices, Range
from harness.sweeps.standing import standing_of
from harness.sweeps.trials import Search, TrialResult, describe_best, describe_search, load_search
from tests.support.launch import Workshop, metrics
from tests.support.sweeping import start, sweep_command, when

optuna = pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
optuna.logging.set_verbosity(optuna.logging.WARNING)

from harness.sweeps.search import LARGEST_FAILURES, SearchLimits, SearchRunner  # noqa: E402
from harness.sweeps.study import Pruner, Sampler  # noqa: E402

PATIENCE_SECONDS = 100
RATES = {"min": 0.0001, "max": 1.0, "log": True}

# Its loss is lowest at a rate of 0.01. Two validations, at 640 and 1280 tokens. If there is a file `hold`, it goes on
# after the first until it is asked to stop; and is bad, if that says so. With a weight decay of 1 it fails; with an eps
# of 1 its loss is not finite.
IN_PLACE_OF_TRAINING = """
import json, math, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[4], sys.argv[1])
train = json.loads((run / "train.json").read_text())
def stop(*_):
    print("stopped by SIGTERM", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
hold = run.parent.parent / "hold"
is_held = hold.exists()
loss = 9.0 if is_held and hold.read_text() else 1 + (math.log10(train["learning_rate"]) + 2) ** 2
if train.get("eps") == 1:
    loss = None
def validation(step, loss):
    event = {"event": "validation", "global_step": step, "tokens_seen": 64 * (step + 1), "loss": loss}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\\n")
validation(9, loss if loss is None else loss + 1)
if train.get("weight_decay") == 1:
    sys.exit("error: it fails")
while is_held:
    time.sleep(0.01)
validation(19, loss)
summary = {"device": "none", "world_size": 1, "final_validation_loss": loss, "best_loss": loss, "train": train}
(run / "draft").write_text(json.dumps(summary))
(run / "draft").rename(run / "summary.json")  # whole at once, as training writes it
"""


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_run("base", price_per_hour=36_000.0)
    made.add_dataset()
    (tmp_path / "in_place.py").write_text(IN_PLACE_OF_TRAINING)
    return made


@pytest.fixture(autouse=True)
def runners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runner listens to signals from then on. It looks often: these trials take no time."""
    monkeypatch.setattr(sweep_run, "POLL_SECONDS", 0.01)
    before = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def load(shop: Workshop, **keys: Any) -> Search:
    path = shop.path / "s.json"
    path.write_text(json.dumps({"base": "base", "search": {"learning_rate": RATES}, "trials": 3} | keys))
    return load_search(path, shop.runs)


def run(
    shop: Workshop, search: Search, groups: int = 1, max_dollars: float | None = None, prunes: bool = False
) -> tuple[Ends, list[str]]:
    planner = Planner(MachineUse(shop.datasets, groups, 1), AssumedSpeed().options(shop.runs))
    said: list[str] = []
    limits = SearchLimits(max_dollars, prunes)
    return SearchRunner(search, planner, shop.path / "in_place.py", limits).run(said.append), said


def results(search: Search) -> list[TrialResult]:
    return [search.result_of(trial) for trial in search.trials()]


def points(search: Search) -> list[dict[str, Any]]:
    return [trial.point for trial in search.trials()]


# What Optuna answers


def made_results(search: Search, loss_of: Callable[[dict[str, Any]], float], count: int) -> list[TrialResult]:
    """Trials as a search would choose them, with losses; nothing is on the disk."""
    sampler = Sampler(search.sweep.search, search.sweep.sampler_seed)
    found: list[TrialResult] = []
    for number in range(count):
        trial = search.make_trial(number, sampler.suggest(found, number, 0))
        loss = loss_of(trial.point)
        state: Any = "finished" if math.isfinite(loss) else "diverged"
        found.append(TrialResult(trial, state, {}, loss if math.isfinite(loss) else None))
    return found


def test_points_are_those_of_one_study_that_goes_on(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study that is made anew for every question answers like one that is asked and told all along."""
    seeds: list[int] = []
    original = optuna.samplers.TPESampler

    def noting(seed: int, **given: Any) -> Any:
        seeds.append(seed)
        return original(seed=seed, **given)

    monkeypatch.setattr(optuna.samplers, "TPESampler", noting)
    space = {
        "n_layers": {"min": 1, "max": 9},
        "emb_dim": {"min": 16, "max": 256, "step": 16},
        "lr_schedule": ["constant", "cosine"],
    }

    def loss_of(point: Mapping[str, Any]) -> float:
        return abs(point["n_layers"] - 6) + abs(point["emb_dim"] - 96) / 64 + (point["lr_schedule"] == "cosine")

    ours = [each.trial.point for each in made_results(load(shop, search=space), loss_of, 25)]
    monkeypatch.undo()
    assert len(set(seeds)) == 25
    study = optuna.create_study()
    theirs = []
    for seed in seeds:
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        trial = study.ask()
        point = {
            "n_layers": trial.suggest_int("n_layers", 1, 9),
            "emb_dim": trial.suggest_int("emb_dim", 16, 256, step=16),
        }
        point["lr_schedule"] = json.loads(trial.suggest_categorical("lr_schedule", ['"constant"', '"cosine"']))
        theirs.append(point)
        study.tell(trial, loss_of(point))
    assert ours == theirs


def test_later_points_are_nearer_to_the_best(shop: Workshop) -> None:
    search = load(shop, trials=40)
    found = made_results(search, lambda point: (math.log10(point["learning_rate"]) + 2) ** 2, 40)
    losses = [each.loss for each in found if each.loss is not None]
    assert statistics.median(losses[-20:]) < statistics.median(losses[:10]) / 4


def test_where_runs_diverge_few_are_tried_again(shop: Workshop) -> None:
    """Optuna does not look at failed trials at all."""
    search = load(shop, trials=40)
    found = made_results(search, lambda point: math.nan if point["learning_rate"] > 0.01 else 1.0, 40)
    diverged = [each.state == "diverged" for each in found]
    assert sum(diverged[:10]) >= 3, "half of the range"
    assert sum(diverged[-20:]) <= 5


def result(search: Search, losses: dict[int, float], state: Any = "finished") -> TrialResult:
    return TrialResult(search.make_trial(0, {"learning_rate": 0.1}), state, losses, min(losses.values()))


def test_pruning_is_the_median_rule(shop: Workshop) -> None:
    search, random_numbers = load(shop), random.Random(3)
    pruner = Pruner(Pruning(after_trials=4, after_share=0.5))
    verdicts = []
    for _ in range(200):
        others = [{100 * i: random_numbers.random() for i in range(1, 11)} for _ in range(random_numbers.randint(3, 7))]
        losses = {100 * i: random_numbers.uniform(0.4, 1.4) for i in range(1, random_numbers.randint(2, 11))}
        last = max(losses)
        expected = (
            len(others) >= 4
            and last >= 500
            and min(losses.values()) > statistics.median(other[last] for other in others)
        )
        assert pruner.gives_up(losses, [result(search, other) for other in others], 1000) == expected
        verdicts.append(expected)
    assert 5 < sum(verdicts) < 195


def test_pruning_compares_after_as_many_tokens(shop: Workshop) -> None:
    """Others were validated at other places: their last before counts; one that was not yet does not count."""
    search, pruner = load(shop), Pruner(Pruning(after_trials=2, after_share=0.0))
    others = [result(search, {90: 2.0, 180: 1.0}), result(search, {70: 2.2, 140: 2.1}), result(search, {130: 0.1})]
    assert pruner.gives_up({100: 2.2}, others, 200)
    assert not pruner.gives_up({100: 2.05}, others, 200)
    assert pruner.gives_up({100: math.nan}, others, 200)


def test_values_that_json_tells_apart(shop: Workshop) -> None:
    sampler = Sampler({"a": Choices((1, 1.0, True, None, [0.9, 0.95]))}, 0)
    found = {json.dumps(sampler.suggest([], number, 0)["a"]) for number in range(60)}
    assert found == {"1", "1.0", "true", "null", "[0.9, 0.95]"}


def test_the_seed_is_the_files(shop: Workshop) -> None:
    domains = {"a": Range(min=0.0, max=1.0)}
    first, second = (Sampler(domains, seed).suggest([], 0, 0) for seed in (1, 2))
    assert first != second
    assert Sampler(domains, 1).suggest([], 0, 0) == first


# From the file to the runs


def test_trials_are_runs_that_say_what_was_chosen(shop: Workshop) -> None:
    search = load(shop, trials=4, set={"weight_decay": 0.5})
    ends, said = run(shop, search)
    assert len(ends.finished) == 4
    for number, trial in enumerate(search.trials()):
        rate = trial.point["learning_rate"]
        assert trial.run.name == f"s-{number:03d}-lr{rate}"
        assert trial.run.train_config.learning_rate == rate
        assert trial.run.train_config.weight_decay == 0.5
        derived = read_json_object(trial.run.run.path / "derived.json")
        assert derived["trial"] == {"number": number, "point": {"learning_rate": rate}}
        assert derived["differs"]["learning_rate"]["here"] == rate
    assert [line.split(":")[0] for line in said] == [name for name in ends.finished for _ in "12"]
    assert run(shop, search) == (Ends(), [])


def test_status_and_the_end_name_the_best_first(shop: Workshop) -> None:
    search = load(shop, trials=4)
    run(shop, search)
    losses = sorted((each.loss or 0.0, each.trial.run.name) for each in results(search))
    status = sweep_command(shop, "status").stdout.splitlines()
    assert status[0] == f"Search s in {shop.runs}, 4 of 4 trials made: 4 finished"
    assert [line.split()[0] for line in status[2:]] == [name for _, name in losses]
    best = describe_best(search, results(search))
    assert best[1] == f"Best of 4 finished trials: {losses[0][1]}"
    rate = losses[0][1].removeprefix("s-").split("lr")[1]
    assert best[2:4] == [f"    validation loss {losses[0][0]:.3f}", f"    learning_rate {rate}"]
    assert best[5] == f"    validation loss {losses[1][0]:.3f}, {losses[1][0] - losses[0][0]:.3f} more"
    assert "training noise is not known" in best[6]


def test_each_point_is_tried_once(shop: Workshop) -> None:
    """Optuna says a point again where there are few."""
    search = load(shop, search={"learning_rate": [0.1, 0.01, 0.001], "lr_schedule": ["constant", "cosine"]}, trials=6)
    ends, _ = run(shop, search)
    assert len(ends.finished) == 6
    assert len({json.dumps(point) for point in points(search)}) == 6


def test_points_that_cannot_be_trained_are_left_out(shop: Workshop) -> None:
    """16 dimensions are not a multiple of 3 heads."""
    search = load(shop, search={"n_heads": {"min": 2, "max": 4}, "learning_rate": RATES}, trials=6)
    ends, said = run(shop, search)
    assert len(ends.finished) == 6
    assert {point["n_heads"] for point in points(search)} == {2, 4}
    assert sum("16 is not a multiple of n_heads (3)" in line for line in said) == 1


def test_points_that_no_training_can_start_are_left_out(shop: Workshop) -> None:
    """A warm-up that is longer than the 20 steps."""
    space = {"warmup_steps": [2, 20, 21, 30], "lr_schedule": ["constant", "cosine"]}
    search = load(shop, set={"learning_rate": 0.01}, search=space, trials=4)
    ends, said = run(shop, search)
    assert len(ends.finished) == 4
    assert {point["warmup_steps"] for point in points(search)} == {2, 20}
    assert sum("steps of warm-up are longer than the run" in line for line in said) == 1


def test_a_space_without_a_possible_point_is_told(shop: Workshop) -> None:
    search = load(shop, search={"n_heads": [3, 5, 6], "learning_rate": RATES})
    ends, _ = run(shop, search)
    assert ends.reason.startswith("no new point was found among 200 that were drawn: ")
    assert "16 is not a multiple of n_heads" in ends.reason
    assert [folder.name for folder in shop.runs.iterdir()] == ["base"]


def test_failed_trials_stop_no_other(shop: Workshop) -> None:
    search = load(shop, search={"weight_decay": [1.0, 0.1, 0.2], "learning_rate": RATES}, trials=8)
    ends, _ = run(shop, search)
    failed = [each.trial.run.name for each in results(search) if each.trial.point["weight_decay"] == 1.0]
    assert failed
    assert ends.failed == failed
    assert len(ends.finished) == 8 - len(failed)
    assert standing_of(search.trials()[int(failed[0][2:5])].run).state == "failed"


def test_where_all_fail_the_search_ends(shop: Workshop) -> None:
    search = load(shop, set={"weight_decay": 1.0}, trials=20)
    ends, _ = run(shop, search)
    assert len(ends.failed) == LARGEST_FAILURES
    assert ends.reason == "5 trials one after the other have failed"
    assert len(search.trials()) == LARGEST_FAILURES


def test_a_loss_that_is_not_finite_is_no_result(shop: Workshop) -> None:
    search = load(shop, search={"eps": [1.0, 0.1], "learning_rate": RATES}, trials=6)
    ends, _ = run(shop, search)
    assert len(ends.finished) == 6
    states = {each.trial.point["eps"]: (each.state, each.loss is None) for each in results(search)}
    assert states == {1.0: ("diverged", True), 0.1: ("finished", False)}
    assert "diverged" not in describe_search(search)
    assert (
        f"Best of {sum(point['eps'] == 0.1 for point in points(search))} finished"
        in describe_best(search, results(search))[1]
    )


# Pruning


def held(shop: Workshop, trials: int, **keys: Any) -> Search:
    """A search whose first three trials are finished; those to come are bad and do not end by themselves."""
    run(shop, load(shop, pruning={"after_trials": 3, "after_share": 0.3}, trials=3))
    (shop.path / "hold").write_text("bad")
    return load(shop, pruning={"after_trials": 3, "after_share": 0.3} | keys, trials=trials)


def test_bad_trials_are_given_up_and_stay_so(shop: Workshop) -> None:
    search = held(shop, 5)
    ends, said = run(shop, search, prunes=True)
    names = [trial.run.name for trial in search.trials()]
    assert ends == Ends(pruned=names[3:])
    assert f"{names[3]}: pruned at global step 9, validation loss 10.000" in said
    for trial in search.trials()[3:]:
        assert search.result_of(trial).state == "pruned"
        log = (trial.run.run.path / "sweep.log").read_text()
        assert log.splitlines()[-2:] == ["# pruned at global step 9", "stopped by SIGTERM"]
    status = sweep_command(shop, "status").stdout
    assert f"{names[3]} pruned at global step 9, validation loss 10.000" in " ".join(status.split())
    assert "3 finished, 2 pruned" in status
    assert run(shop, search, prunes=True) == (Ends(), [])
    assert (search.trials()[3].run.run.path / "sweep.log").read_text().count("$ ") == 1


def test_a_trial_that_was_given_up_when_the_search_was_killed_stays_so(shop: Workshop) -> None:
    """The record is written before the run is asked to end."""
    search = held(shop, 4)
    run(shop, search, prunes=True)
    (shop.path / "hold").unlink()
    given_up = search.trials()[3].run
    assert run(shop, search, prunes=True) == (Ends(), [])
    (given_up.run.path / "sweep.log").unlink()
    (given_up.run.path / "metrics.jsonl").unlink()
    assert run(shop, search)[0].finished == [given_up.name], "it is this record that keeps it"


def test_without_pruning_every_trial_is_trained_to_its_end(shop: Workshop) -> None:
    search = held(shop, 4)
    name = "s-003-"
    when(lambda: any(search.runs_dir.glob(f"{name}*/metrics.jsonl")), lambda: os.kill(os.getpid(), signal.SIGTERM))
    ends, _ = run(shop, search)
    assert (len(ends.stopped), ends.pruned, ends.signal) == (1, [], signal.SIGTERM)
    (shop.path / "hold").unlink()
    assert run(shop, search)[0].finished == ends.stopped


# Stopped, grown, changed


@pytest.mark.slow
def test_stopped_and_gone_on_with_it_makes_the_same_trials(shop: Workshop) -> None:
    """Beyond the ten at random: what is rebuilt from the folders is the study that had never ended."""
    search = load(shop, trials=14)
    for number in (4, 11):
        run(shop, load(shop, trials=number))
        (shop.path / "hold").touch()
        pattern = f"s-{number:03d}-*/metrics.jsonl"
        when(partial(begun, shop, pattern), lambda: os.kill(os.getpid(), signal.SIGINT))
        ends, _ = run(shop, load(shop, trials=14))
        assert [name[:5] for name in ends.stopped] == [f"s-{number:03d}"]
        (shop.path / "hold").unlink()
    run(shop, search)
    interrupted = [(each.trial.run.name, each.loss) for each in results(search)]
    start_anew(shop)
    run(shop, search)
    assert [(each.trial.run.name, each.loss) for each in results(search)] == interrupted
    assert len(interrupted) == 14


def begun(shop: Workshop, pattern: str) -> bool:
    return any(shop.runs.glob(pattern))


def start_anew(shop: Workshop) -> None:
    """Set all trials aside."""
    shop.runs.rename(shop.path / "first")
    (shop.runs / "base").mkdir(parents=True)
    for name in ("model.json", "train.json"):
        (shop.path / "first" / "base" / name).rename(shop.runs / "base" / name)


def test_trials_at_the_same_time(shop: Workshop) -> None:
    search = load(shop, trials=6)
    ends, said = run(shop, search, groups=3)
    assert len(ends.finished) == 6
    assert len({json.dumps(point) for point in points(search)}) == 6
    assert [line.split(" on ")[1] for line in said if "started" in line][:3] == ["group 1", "group 2", "group 3"]


def test_trials_outside_a_changed_range_are_kept_but_not_learned_from(shop: Workshop) -> None:
    run(shop, load(shop, trials=3))
    narrow = load(shop, search={"learning_rate": {"min": 0.009, "max": 0.011}}, trials=5)
    ends, _ = run(shop, narrow)
    assert len(ends.finished) == 2
    assert len(results(narrow)) == 5
    assert all(0.009 <= point["learning_rate"] <= 0.011 for point in points(narrow)[3:])


def test_changed_settings_are_refused(shop: Workshop) -> None:
    run(shop, load(shop, trials=1))
    changed = load(shop, set={"weight_decay": 0.3})
    with pytest.raises(UserError, match=r"there is another run of this name \(weight_decay: 0\.1 -> 0\.3\)"):
        changed.trials()


def test_a_copy_of_a_trial_is_no_trial(shop: Workshop) -> None:
    search = load(shop, trials=1)
    run(shop, search)
    (trial,) = search.trials()
    trial.run.run.path.rename(shop.runs / "s-000-other")
    assert search.trials() == []


# Money


def test_the_budget_counts_what_is_not_made_yet(shop: Workshop) -> None:
    load(shop, trials=3)
    done = sweep_command(shop, "search", str(shop.datasets), "--max-dollars", "0.001")
    assert done.status == 1, done.stderr
    assert "runs are left: --max-dollars 0.00" in done.stderr
    assert " of 3 runs are left" in done.stderr


def test_a_budget_without_a_price_is_refused(shop: Workshop) -> None:
    with pytest.raises(UserError, match=r'key "price_per_hour": --max-dollars needs it in "set"'):
        run(shop, load(shop, set={"price_per_hour": None}), max_dollars=5.0)


def test_more_trials_than_points_are_refused(shop: Workshop) -> None:
    load(shop, search={"learning_rate": [0.1, 0.2, 0.3]})
    done = sweep_command(shop, "search", str(shop.datasets), "--trials", "4")
    assert done.status == 2
    assert 'key "search": has 3 points, fewer than 4 trials' in done.stderr


# Real runs


@pytest.mark.slow
def test_a_real_search_killed_in_the_middle_ends_as_if_nothing_had_happened(shop: Workshop) -> None:
    keys: dict[str, Any] = {"search": {"learning_rate": RATES, "n_layers": {"min": 1, "max": 2}}, "trials": 2}
    keys["set"] = {"min_train_tokens": 64 * 80, "validation_interval": 20}
    shop.add_dataset("local/more", tokens=20_000)
    shop.add_run("base", dataset="local/more")
    load(shop, **keys)
    words = ["search", str(shop.path / "s.json"), str(shop.datasets)]
    first = start(shop, "sweep_runs.py", *words)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any(len(metrics(path.parent)) > 3 for path in shop.runs.glob("s-001-*/metrics.jsonl")):
        assert first.poll() is None, first.communicate(timeout=10)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.kill()
    first.communicate(timeout=PATIENCE_SECONDS)
    done = sweep_command(shop, "search", str(shop.datasets))
    assert done.status == 0, done.stdout + done.stderr
    assert "Best of 2 finished trials: s-00" in done.stdout
    search = load(shop, **keys)
    interrupted = [(each.trial.run.name, each.loss) for each in results(search)]
    assert (search.trials()[1].run.run.path / "sweep.log").read_text().count("\n$ ") == 2
    start_anew(shop)
    assert sweep_command(shop, "search", str(shop.datasets)).status == 0
    assert [(each.trial.run.name, each.loss) for each in results(search)] == interrupted
