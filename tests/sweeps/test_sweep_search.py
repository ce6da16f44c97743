"""Searches: what Optuna answers against Optuna's own study and plain arithmetic; runs that are made, given up, killed
and gone on with. Most have a program in ddp_train.py's place whose loss is a function of the settings.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import RunError, UserError
from harness.common.json_files import read_json_object
from harness.sweeps import run as sweep_run
from harness.sweeps.file import load_sweep
from harness.sweeps.plan import Planner
from harness.sweeps.search import (
    LARGEST_FAILURES,
    Result,
    Sampler,
    Search,
    SearchRunner,
    describe_best,
    describe_search,
    is_worse_than_median,
    load_search,
)
from harness.sweeps.status import Status
from tests.support.launch import Workshop, metrics
from tests.support.sweeping import has_reported, start, sweep_command, when

optuna = pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
optuna.logging.set_verbosity(optuna.logging.WARNING)

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
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """These trials take no time."""
    monkeypatch.setattr(sweep_run, "LOOK_SECONDS", 0.01)


def load(shop: Workshop, **keys: Any) -> Search:
    path = shop.path / "s.json"
    path.write_text(json.dumps({"base": "base", "search": {"learning_rate": RATES}, "trials": 3} | keys))
    return load_search(path, shop.runs)


def run(
    shop: Workshop, search: Search, groups: int = 1, max_dollars: float | None = None, prunes: bool = False
) -> tuple[SearchRunner, list[str]]:
    """Run the search; return its runner, and the lines said meanwhile."""
    planner = Planner(shop.datasets, shop.runs, groups=groups, processes=1)
    pruning = search.sweep.pruning if prunes else None
    runner = SearchRunner(search, planner, shop.path / "in_place.py", max_dollars=max_dollars, pruning=pruning)
    said: list[str] = []
    runner.run(said.append)
    return runner, said


def states(search: Search) -> list[str]:
    return [result.status.state for result in search.results()]


def points(search: Search) -> list[dict[str, Any]]:
    return [result.point for result in search.results()]


def outcome(search: Search) -> list[tuple[str, float | None]]:
    return [(result.run.name, result.loss) for result in search.results()]


# What is refused


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"learning_rat": RATES}, 'in "search": key "learning_rat": unknown; did you mean "learning_rate"?'),
        ({"learning_rate": {"min": 0.1, "max": 0.01}}, 'key "learning_rate": "min" (0.1) must be below "max" (0.01)'),
        (
            {"learning_rate": {"min": 0, "max": 1, "log": True}},
            "`low > 0` must hold for `log=True`",
        ),
        ({"learning_rate": {"min": 1e-3, "maxx": 1}}, 'key "search.learning_rate.maxx": unknown'),
        ({"learning_rate": {"min": 1e-3}}, 'key "search.learning_rate.max": missing'),
        ({"learning_rate": {"min": "a", "max": 1}}, 'key "search.learning_rate.min": input should be a valid'),
        ({"learning_rate": {"min": True, "max": 2}}, 'key "search.learning_rate.min": input should be a valid'),
        ({"learning_rate": {**RATES, "step": 0.1}}, 'give a list of values in place of "log" and "step"'),
        ({"learning_rate": 0.1}, 'key "search.learning_rate": must be an object, { ... }, not 0.1'),
        ({"learning_rate": []}, "give at least two values"),
        ({"learning_rate": [0.1, 0.1, 0.2]}, "each once"),
        ({"n_layers": {"min": 1, "max": 2.5}}, 'key "n_layers": "min", "max" and "step" must be whole numbers'),
        ({"emb_dim": {"min": 16, "max": 60, "step": 16}}, '"step" (16) does not divide the range'),
        ({"random_seed": [1, 2, 3]}, "cannot be searched: the lowest loss would be the luckiest seed's"),
        ({"microbatch_size": [1, 2, 4]}, 'so that trials would not compare; search "global_batch_size"'),
        ({}, 'key "search": name at least one key'),
        ([1], 'key "search": input should be a valid dictionary, not [1]'),
    ],
)
def test_bad_ranges_get_one_line(shop: Workshop, search: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        Sampler(load(shop, search=search))
    message = str(caught.value)
    assert message.startswith(f"{shop.path / 's.json'}: ")
    assert message.splitlines() == [message]
    assert said in message


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"trials": 0}, 'key "trials": input should be greater than or equal to 1, not 0'),
        ({"trials": 1001}, 'key "trials": input should be less than or equal to 1000'),
        ({"trials": None}, 'key "trials": missing; give the number of runs'),
        ({"trial": 3}, 'key "trial": unknown; did you mean "trials"?'),
        ({"vary": {"learning_rate": [0.1]}}, 'keys "search" and "vary": leave one of them out'),
        ({"together": [{"eps": 0.1}]}, 'keys "search" and "together": leave one of them out'),
        ({"set": {"learning_rate": 0.1}}, 'key "learning_rate": given in "set" and in "search"; keep one'),
        ({"objective": "train_loss"}, "key \"objective\": input should be 'final_validation_loss' or 'best_valid"),
        ({"pruning": {"after_trial": 3}}, 'key "pruning.after_trial": unknown'),
        ({"pruning": False}, 'key "pruning": must be an object'),
        ({"set": {"validation_interval": None}}, 'key "validation_interval": the runs would have no validation loss'),
        ({"search": {}, "trials": None}, 'key "search": name at least one key'),
    ],
)
def test_bad_searches_get_one_line(shop: Workshop, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        load(shop, **keys)


def test_a_sweep_is_no_search_nor_the_reverse(shop: Workshop) -> None:
    path = shop.path / "s.json"
    path.write_text(json.dumps({"base": "base", "vary": {"eps": [0.1]}}))
    with pytest.raises(UserError, match='key "search": missing; without it, `sweep_runs'):
        load_search(path, shop.runs)
    load(shop)
    with pytest.raises(UserError, match=r"makes its runs one by one as it trains them: `sweep_runs\.py search "):
        load_sweep(path, shop.runs)


def test_without_optuna_the_remedy_is_named(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status needs no Optuna."""
    search = load(shop)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"the optuna package is missing: uv run --extra sweep sweep_runs\.py search"):
        run(shop, search)
    assert describe_search(search) == f"Search s in {shop.runs}, 0 of 3 trials made: nothing is made yet"


# What Optuna answers


def made_results(search: Search, loss_of: Callable[[dict[str, Any]], float], count: int) -> list[Result]:
    """Trials as a search would choose them, with losses; nothing is on the disk."""
    sampler = Sampler(search)
    found: list[Result] = []
    for number in range(count):
        point = sampler.suggest(found, number, 0)
        loss: float | None = loss_of(point)
        loss = loss if loss is not None and math.isfinite(loss) else None
        found.append(
            Result(number, point, Status(search.derive(number, point), "finished"), {}, loss, has_diverged=loss is None)
        )
    return found


@pytest.mark.parametrize(
    "domain",
    [
        RATES,
        {"min": 1000, "max": 1001},
        {"min": 0.1, "max": 0.2},
        {"min": 3e-9, "max": 0.5, "log": True},
        {"min": 0.007, "max": 0.035, "step": 0.007},
    ],
    ids=str,
)
def test_values_are_short_numbers_in_the_range(shop: Workshop, domain: dict[str, float]) -> None:
    sampler = Sampler(load(shop, search={"weight_decay": domain}))
    values: list[Any] = [sampler.suggest([], number, 0)["weight_decay"] for number in range(40)]
    assert all(domain["min"] <= value <= domain["max"] and len(repr(value)) <= 10 for value in values)
    if "step" in domain:
        assert set(values) == {0.007, 0.014, 0.021, 0.028, 0.035}
    else:
        assert len(set(values)) >= 33


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

    ours = [each.point for each in made_results(load(shop, search=space), loss_of, 25)]
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


def test_where_runs_diverge_few_are_tried_again(shop: Workshop) -> None:
    """Optuna does not look at failed trials at all."""
    search = load(shop, trials=40)
    found = made_results(search, lambda point: math.nan if point["learning_rate"] > 0.01 else 1.0, 40)
    diverged = [each.has_diverged for each in found]
    assert sum(diverged[:10]) >= 3, "half of the range"
    assert sum(diverged[-20:]) <= 5


def test_pruning_compares_after_as_many_tokens() -> None:
    """Others were validated at other places: their last before counts; one that was not yet does not count."""
    others = [{90: 2.0, 180: 1.0}, {70: 2.2, 140: 2.1}, {130: 0.1}]
    assert is_worse_than_median({100: 2.2}, others)
    assert not is_worse_than_median({100: 2.05}, others)
    assert is_worse_than_median({50: 2.4, 100: math.inf}, others)
    assert not is_worse_than_median({50: 2.0, 100: math.inf}, others), "the lowest so far counts"
    assert not is_worse_than_median({60: 9.0}, others), "no other was validated by then"


def test_values_that_json_tells_apart_and_seeds(shop: Workshop) -> None:
    def suggested(seed: int) -> list[str]:
        sampler = Sampler(load(shop, search={"weight_decay": [1, 1.0, True, None, [0.9, 0.95]]}, sampler_seed=seed))
        return [json.dumps(sampler.suggest([], number, 0)["weight_decay"]) for number in range(40)]

    assert {*suggested(1)} == {"1", "1.0", "true", "null", "[0.9, 0.95]"}
    assert suggested(1) == suggested(1) != suggested(2)


# From the file to the runs


def test_trials_are_runs_that_say_what_was_chosen(shop: Workshop) -> None:
    """The status and the end name the best first. A copy of a trial is none."""
    search = load(shop, trials=4, set={"weight_decay": 0.5})
    _, said = run(shop, search)
    assert states(search) == ["finished"] * 4
    for number, trial in enumerate(search.results()):
        rate = trial.point["learning_rate"]
        assert trial.run.name == f"s-{number:03d}-lr{rate}"
        assert (trial.run.train_config.learning_rate, trial.run.train_config.weight_decay) == (rate, 0.5)
        derived = read_json_object(trial.run.run.path / "derived.json")
        assert derived["trial"] == {"number": number, "point": {"learning_rate": rate}}
        assert derived["differs"]["learning_rate"]["here"] == rate
    assert [line.split(":")[0] for line in said] == [name for name, _ in outcome(search) for _ in "12"]
    assert run(shop, search)[1] == []
    losses = sorted((loss or 0.0, name) for name, loss in outcome(search))
    status = sweep_command(shop, "status").stdout.splitlines()
    assert status[0] == f"Search s in {shop.runs}, 4 of 4 trials made: 4 finished"
    assert [line.split()[0] for line in status[2:]] == [name for _, name in losses]
    best = describe_best(search, search.results())
    assert best[1] == f"Best of 4 finished trials: {losses[0][1]}"
    assert best[2:4] == [f"    validation loss {losses[0][0]:.3f}", f"    learning_rate {losses[0][1].split('lr')[1]}"]
    assert best[5] == f"    validation loss {losses[1][0]:.3f}, {losses[1][0] - losses[0][0]:.3f} more"
    trial.run.run.path.rename(shop.runs / "s-003-other")
    assert len(search.results()) == 3


def test_each_point_is_tried_once(shop: Workshop) -> None:
    """Optuna says a point again where there are few; and where none is left, the search says so."""
    search = load(shop, search={"learning_rate": [0.1, 0.01], "lr_schedule": ["constant", "cosine"]}, trials=5)
    runner, _ = run(shop, search)
    assert states(search) == ["finished"] * 4
    assert len({json.dumps(point) for point in points(search)}) == 4
    said = "no new point was found among 200 that were drawn: "
    assert runner.reason == f"{said}all that were drawn are trials already"
    runner, _ = run(shop, load(shop, name="t", search={"n_heads": [3, 5], "learning_rate": RATES}))
    assert runner.reason.startswith(said)
    assert "16 is not a multiple of n_heads" in runner.reason
    assert not list(shop.runs.glob("t-*"))


def test_points_that_cannot_be_trained_are_left_out(shop: Workshop) -> None:
    space = {"n_heads": {"min": 2, "max": 4}, "warmup_steps": [2, 30], "eps": [0.1, "high"], "learning_rate": RATES}
    search = load(shop, search=space, trials=4)
    _, said = run(shop, search)
    assert states(search) == ["finished"] * 4
    for point in points(search):
        assert (point["n_heads"] != 3, point["warmup_steps"], point["eps"]) == (True, 2, 0.1)
    assert sum("A point that cannot be trained is left out" in line for line in said) == 1


def test_failed_and_diverged_trials_stop_no_other(shop: Workshop) -> None:
    space = {"weight_decay": [1.0, 0.1], "eps": [1.0, 0.1], "learning_rate": RATES}
    search = load(shop, search=space, trials=8)
    run(shop, search)
    fails = [point["weight_decay"] == 1.0 for point in points(search)]
    assert {*fails} == {True, False}
    assert states(search) == ["failed" if each else "finished" for each in fails]
    found = {
        each.point["eps"]: (each.has_diverged, each.loss is None)
        for each in search.results()
        if each.point["weight_decay"] != 1.0
    }
    assert found == {1.0: (True, True), 0.1: (False, False)}
    count = sum((point["weight_decay"], point["eps"]) == (0.1, 0.1) for point in points(search))
    assert f"Best of {count} finished" in describe_best(search, search.results())[1]


def test_where_all_fail_the_search_ends(shop: Workshop) -> None:
    search = load(shop, set={"weight_decay": 1.0}, trials=20)
    runner, _ = run(shop, search)
    assert states(search) == ["failed"] * LARGEST_FAILURES
    assert runner.reason == "5 trials one after the other have failed"


# Pruning


def held(shop: Workshop, trials: int) -> Search:
    """A search whose first three trials are finished; those to come are bad and do not end by themselves."""
    pruning = {"after_trials": 3, "after_share": 0.3}
    run(shop, load(shop, pruning=pruning, trials=3))
    (shop.path / "hold").write_text("bad")
    return load(shop, pruning=pruning, trials=trials)


def test_bad_trials_are_pruned_and_stay_so(shop: Workshop) -> None:
    """The mark is in the log before the run is asked to end: without the mark the run would continue."""
    search = held(shop, 5)
    _, said = run(shop, search, prunes=True)
    assert states(search) == ["finished"] * 3 + ["pruned"] * 2
    pruned = search.results()[3].run
    assert f"{pruned.name}: pruned at global step 9, validation loss 10.000" in said
    log = (pruned.run.path / "sweep.log").read_text()
    assert log.splitlines()[-2:] == ["# pruned at global step 9", "stopped by SIGTERM"]
    status = sweep_command(shop, "status").stdout
    assert f"{pruned.name} pruned at global step 9" in " ".join(status.split())
    assert "3 finished, 2 pruned" in status
    (shop.path / "hold").unlink()
    assert run(shop, search, prunes=True)[1] == []
    assert (pruned.run.path / "sweep.log").read_text().count("$ ") == 1
    (pruned.run.path / "sweep.log").unlink()
    (pruned.run.path / "metrics.jsonl").unlink()
    run(shop, search)
    assert states(search) == ["finished"] * 4 + ["pruned"]


def test_without_pruning_every_trial_is_trained_to_its_end(shop: Workshop) -> None:
    search = held(shop, 4)
    when(lambda: has_reported(shop, "s-003-*"), lambda: os.kill(os.getpid(), signal.SIGTERM))
    runner, _ = run(shop, search)
    assert (states(search)[3], runner.signal) == ("stopped", signal.SIGTERM)
    (shop.path / "hold").unlink()
    run(shop, search)
    assert states(search) == ["finished"] * 4


# Stopped, grown, changed


@pytest.mark.slow
def test_stopped_and_gone_on_with_it_makes_the_same_trials(shop: Workshop) -> None:
    """Beyond the ten at random: what is rebuilt from the folders is the study that had never ended."""
    search = load(shop, trials=12)
    run(shop, load(shop, trials=10))
    (shop.path / "hold").touch()
    when(lambda: has_reported(shop, "s-010-*"), lambda: os.kill(os.getpid(), signal.SIGINT))
    run(shop, search)
    assert states(search) == ["finished"] * 10 + ["stopped"]
    (shop.path / "hold").unlink()
    run(shop, search)
    interrupted = outcome(search)
    start_anew(shop)
    run(shop, search)
    assert outcome(search) == interrupted
    assert len(interrupted) == 12


def start_anew(shop: Workshop) -> None:
    """Set all trials aside."""
    shop.runs.rename(shop.path / "first")
    (shop.runs / "base").mkdir(parents=True)
    for name in ("model.json", "train.json"):
        (shop.path / "first" / "base" / name).rename(shop.runs / "base" / name)


def test_trials_at_the_same_time(shop: Workshop) -> None:
    search = load(shop, trials=6)
    _, said = run(shop, search, groups=3)
    assert states(search) == ["finished"] * 6
    assert len({json.dumps(point) for point in points(search)}) == 6
    assert [line.split(" on ")[1] for line in said if "started" in line][:3] == ["group 1", "group 2", "group 3"]


def test_a_changed_file(shop: Workshop) -> None:
    """Trials outside a changed range are kept but not learned from; other settings are refused."""
    run(shop, load(shop, trials=3))
    narrow = load(shop, search={"learning_rate": {"min": 0.009, "max": 0.011}}, trials=5)
    run(shop, narrow)
    assert states(narrow) == ["finished"] * 5
    assert all(0.009 <= point["learning_rate"] <= 0.011 for point in points(narrow)[3:])
    changed = load(shop, set={"weight_decay": 0.3})
    with pytest.raises(UserError, match=r"there is another run of this name \(weight_decay: 0\.1 -> 0\.3\)"):
        changed.results()


def test_a_budget_counts_what_is_not_made_yet_and_needs_a_price(shop: Workshop) -> None:
    runner, _ = run(shop, load(shop), max_dollars=0.0)
    assert runner.reason.startswith("--max-dollars 0.00")
    with pytest.raises(RunError, match=r"3 of 3 runs are left: --max-dollars 0\.00"):
        runner.leave()
    done = sweep_command(shop, "search", str(shop.datasets), "--max-dollars", "0.001")
    assert (done.status, " of 3 runs are left: --max-dollars 0.00" in done.stderr) == (1, True), done.stderr
    with pytest.raises(UserError, match=r'key "price_per_hour": --max-dollars needs it in "set"'):
        run(shop, load(shop, set={"price_per_hour": None}), max_dollars=5.0)


# Real runs


@pytest.mark.slow
def test_a_real_search_killed_in_the_middle_ends_as_if_nothing_had_happened(shop: Workshop) -> None:
    keys: dict[str, Any] = {"search": {"learning_rate": RATES, "n_layers": {"min": 1, "max": 2}}, "trials": 2}
    keys["set"] = {"min_train_tokens": 64 * 80, "validation_interval": 20}
    shop.add_dataset("local/more", tokens=20_000)
    shop.add_run("base", dataset="local/more")
    search = load(shop, **keys)
    first = start(shop, "sweep_runs.py", "search", str(search.path), str(shop.datasets))
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
    interrupted = outcome(search)
    assert (search.results()[1].run.run.path / "sweep.log").read_text().count("\n$ ") == 2
    start_anew(shop)
    assert sweep_command(shop, "search", str(shop.datasets)).status == 0
    assert outcome(search) == interrupted
