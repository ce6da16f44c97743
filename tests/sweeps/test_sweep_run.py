"""Running a sweep with a program in the place of ddp_train.py. A setting of the run decides what this program does."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.common.errors import STOPPING_SIGNALS, RunError, RunStopped, UserError, one_line_errors
from harness.common.lock import RunLock
from harness.runs.metrics import MetricsFile, TrainEvent
from harness.sweeps.file import SweepRuns
from harness.sweeps.plan import Planner, status_lines, status_of
from harness.sweeps.run import SweepRunner, earlier_attempts
from tests.support.launch import Result, Workshop, finish
from tests.support.sweeping import add_summary, command, load, log_of, make, start, states, sweep_command, when

PATIENCE_SECONDS = 100

# `eps` decides what a run does: 1 fails; 2 writes lines of metrics, each a second of training later, until SIGTERM; 3
# waits until a second run has begun; 6 writes nothing until SIGTERM; 7 and 8 end with status 3 and 4; others finish at
# once.
IN_PLACE_OF_TRAINING = """
import json, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[4], sys.argv[1])
train = json.loads((run / "train.json").read_text())
eps = train.get("eps")
def stop(*_):
    print("stopped by SIGTERM", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("it is", eps, flush=True)
(run / "began").touch()
if eps == 1:
    print("something went before", flush=True)
    sys.exit("error: the disk is full of \\x1b[31mred")
if eps in (7, 8):
    sys.exit(int(eps) - 4)
step = 0
while eps == 2:
    step += 1
    event = {"event": "train", "global_step": step, "tokens_seen": 64 * step, "seconds": step, "loss": 2.5}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**event, "tokens_per_second": 64.0}) + "\\n")
    time.sleep(0.01)
while eps == 6:
    time.sleep(0.01)
while eps == 3 and len(list(run.parent.glob("*/began"))) < 2:
    time.sleep(0.01)
model = json.loads((run / "model.json").read_text())
summary = {"device": "none", "world_size": 1, "final_validation_loss": 1.5, "seconds": {"total": 1.0}, "train": train}
summary["dollars"] = {"total": 50.0}
(run / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_run("base", price_per_hour=36_000.0)  # ten dollars a second
    (tmp_path / "in_place.py").write_text(IN_PLACE_OF_TRAINING)
    return made


@dataclass
class Ended:
    """A sweep that has ended. `said` has the lines that it printed while training, `end` those at its end. `error` is
    the text of its error, or "" if it had none. `stop_reason` and `spent` are those of its SweepRunner."""

    said: list[str]
    end: list[str]
    error: str
    stop_reason: str | None
    spent: float


def run(shop: Workshop, sweep: SweepRuns, *, groups: int = 1, **limits: float) -> Ended:
    """Run the sweep with these `limits` (max_dollars, max_hours) to its end."""
    planner = Planner(shop.datasets, groups=groups, processes=1)
    runner = SweepRunner(sweep.runs, planner, shop.path / "in_place.py", **limits)
    said, end, error = io.StringIO(), io.StringIO(), ""
    with redirect_stdout(said):
        runner.run()
    with redirect_stdout(end):
        try:
            runner.report_end()
        except RunError as caught:
            error = str(caught)
    return Ended(said.getvalue().splitlines(), end.getvalue().splitlines(), error, runner.stop_reason, runner.spent)


def attempt(began: str, groups: int = 1, took: float | None = None) -> str:
    """Return what a run's sweep.log tells of an attempt that began at this time and, unless it was killed, of its
    duration in seconds."""
    share = f", 1 of {groups} groups" if groups > 1 else ""
    end = "" if took is None else f"# took {took} s\n"
    return f"\n$ python ddp_train.py  # 2026-01-01 {began} UTC{share}\n\n{end}"


def test_one_after_the_other_until_all_are_finished(shop: Workshop) -> None:
    sweep = make(shop, vary={"random_seed": [1, 2]})
    ended = run(shop, sweep)
    assert states(sweep) == {"seed1": "finished", "seed2": "finished"}
    assert [line.split(":")[0] for line in ended.said] == ["s-seed1", "s-seed1", "s-seed2", "s-seed2"]
    assert "s-seed2: finished, validation loss 1.500" in ended.said[3]
    words = [sys.executable, str(shop.path / "in_place.py"), "s-seed1", str(shop.datasets)]
    words += ["--runs-dir", str(shop.runs), "--processes", "1"]
    assert log_of(shop, "s-seed1").splitlines()[1].startswith(f"$ {' '.join(words)}  # 20")
    assert (ended.end, ended.error) == (["", "2 finished"], "")
    ended = run(shop, sweep)
    assert ended.said == []
    assert (ended.end, ended.error) == (["", "2 finished"], "")


def test_a_datasets_folder_with_a_line_break_and_a_byte_that_is_not_utf8_in_its_name(shop: Workshop) -> None:
    sweep = make(shop, vary={"random_seed": [1]})
    planner = Planner(Path(os.fsdecode(b"%a\n\xfc" % bytes(shop.datasets))), processes=1)
    with redirect_stdout(io.StringIO()):
        SweepRunner(sweep.runs, planner, shop.path / "in_place.py").run()
    assert states(sweep) == {"seed1": "finished"}
    assert len(earlier_attempts(sweep.runs[0], 1.0)) == 1, "its time counts"


def test_a_failed_run_stops_no_other_and_is_tried_again(shop: Workshop) -> None:
    sweep = make(shop, vary={"eps": [1.0, 4.0, 5.0]})
    ended = run(shop, sweep)
    assert states(sweep) == {"eps1.0": "failed", "eps4.0": "finished", "eps5.0": "finished"}
    assert log_of(shop, "s-eps1.0").endswith("\n# failed with exit status 1\n")
    assert ended.end[1] == "2 finished, 1 failed"
    tail = ["    it is 1.0", "    something went before", "    error: the disk is full of \\x1b[31mred"]
    assert ended.end[-3:] == tail
    assert ended.error == "1 of 3 runs have not finished; the same command tries them again"
    shown = status_lines([status_of(each) for each in sweep.runs])
    assert shown[-5:-2] == tail
    run(shop, sweep)
    assert status_lines([status_of(each) for each in sweep.runs]) == shown, "the last attempt's lines alone"
    (shop.path / "in_place.py").write_text(IN_PLACE_OF_TRAINING.replace("eps == 1", "False"))
    run(shop, sweep)
    assert set(states(sweep).values()) == {"finished"}
    assert log_of(shop, "s-eps1.0").count("\n$ ") == 3


def test_runs_that_end_themselves_stop_no_other(shop: Workshop) -> None:
    """Status 3 is that of a run's own ceiling, and 4 that of a run that has diverged. Neither counts as a failure."""
    sweep = make(shop, vary={"eps": [7.0, 8.0, 5.0]})
    ended = run(shop, sweep)
    ends = [line.split(" after")[0] for line in ended.said if " after" in line]
    assert ends == ["s-eps7.0: stopped by its own max_hours or max_dollars", "s-eps8.0: diverged"]
    assert states(sweep) == {"eps7.0": "never trained", "eps8.0": "never trained", "eps5.0": "finished"}


def test_a_run_that_cannot_be_started_stops_no_other(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a run cannot be started, its devices are given to the next run. The last two runs wait for each other, so they
    finish only if both are running."""
    shop.add_dataset()
    sweep = make(shop, set={"eps": 3.0}, vary={"random_seed": [1, 2, 3, 4]})
    log = shop.runs / "s-seed1" / "sweep.log"
    log.mkdir()
    shutil.rmtree(shop.runs / "s-seed2")
    ended = run(shop, sweep, groups=2)
    assert states(sweep) == {"seed1": "never trained", "seed2": "not made", "seed3": "finished", "seed4": "finished"}
    assert ended.said[0] == f"s-seed1: failed, because it cannot be started: {log}: Is a directory"
    absent = shop.runs / "s-seed2" / "sweep.log"
    assert ended.said[1] == f"s-seed2: failed, because it cannot be started: {absent}: No such file or directory"
    assert ended.error == "2 of 4 runs have not finished; the same command tries them again"
    load(shop, set={"eps": 3.0}, vary={"random_seed": [1, 3]})
    done = sweep_command(shop, "run", str(shop.datasets))
    assert (done.status, done.stderr) == (
        1,
        "error: 1 of 2 runs have not finished; the same command tries them again\n",
    )
    assert ended.said[0] in done.stdout.splitlines()
    log.rmdir()
    python = shop.path / "no-python"
    monkeypatch.setattr(sys, "executable", str(python))
    failed = f"s-seed1: failed, because it cannot be started: {python}: No such file or directory"
    assert run(shop, sweep).said[0] == failed
    assert log.read_text().endswith(" UTC\n"), "the command that was tried"


def test_groups_run_at_the_same_time(shop: Workshop) -> None:
    """Two runs that wait for each other both finish. Runs whose dataset is still to be downloaded take turns."""
    ended = run(shop, make(shop, vary={"random_seed": [1, 2]}), groups=2)
    assert [line.split(":")[0] for line in ended.said] == ["s-seed1", "s-seed1", "s-seed2", "s-seed2"]
    shop.add_dataset()
    sweep = make(shop, name="t", set={"eps": 3.0}, vary={"random_seed": [1, 2]})
    for name in ("s-seed1", "s-seed2"):
        (shop.runs / name / "began").unlink()
    ended = run(shop, sweep, groups=2)
    assert {status_of(each).state for each in sweep.runs} == {"finished"}
    assert "started on group 1" in ended.said[0]
    assert "started on group 2" in ended.said[1]


def test_a_dataset_without_a_split_stops_only_its_own_run(shop: Workshop) -> None:
    shop.add_dataset("local/part")
    sweep = make(shop, set={"eps": 5.0, "validation_interval": 5}, vary={"dataset": ["local/part", "local/letters"]})
    (shop.datasets / "local" / "part" / "validation.safetensors").unlink(missing_ok=True)
    ended = run(shop, sweep, groups=2)
    assert ended.stop_reason is None
    assert [len(log_of(shop, each.name)) > 0 for each in sweep.runs] == [True, True]


# Money


def test_a_run_that_the_budget_does_not_hold_is_not_begun(shop: Workshop) -> None:
    """A run is not begun if its planned cost is more than what is left of --max-dollars. Each run here is planned to
    train on 1280 tokens and to validate on 160, at 96 a second. This takes 15 s and costs 150 dollars."""
    sweep = make(shop, vary={"random_seed": [1, 2, 3]})
    add_summary(sweep.runs[0], dollars={"total": 20.0})
    done = sweep_command(shop, "run", str(shop.datasets), "--max-dollars", "169")
    reason = "max_dollars (169.00): $20.00 is spent, and with s-seed2 the total would be $170.00"
    assert (done.status, done.stderr) == (
        1,
        f"error: 2 of 3 runs are left: {reason}; to continue, raise the sweep's max_hours or max_dollars\n",
    )
    assert done.stdout.splitlines()[0] == "Sweep s: 2 of 3 runs are to be trained"
    ended = run(shop, sweep, max_dollars=171.0)
    assert ended.stop_reason == "max_dollars (171.00): $70.00 is spent, and with s-seed3 the total would be $220.00"
    assert states(sweep) == {"seed1": "finished", "seed2": "finished", "seed3": "never trained"}
    assert not (shop.runs / "s-seed3" / "sweep.log").exists()


def test_runs_under_way_are_counted_and_share_the_machine(shop: Workshop) -> None:
    """Two runs that share the machine, 150 dollars each if alone, cost 150 dollars together. A third, longer run is not
    started beside them, because the machine would then cost 296.67 dollars."""
    shop.add_dataset()
    entries = [{"random_seed": 1}, {"random_seed": 2}, {"random_seed": 3}, {"min_train_tokens": 2560}]
    sweep = make(shop, together=entries)
    add_summary(sweep.runs[0], dollars={"total": 0.0})
    ended = run(shop, sweep, groups=3, max_dollars=151.0)
    assert {*states(sweep).items()} > {("seed1", "finished"), ("seed2", "finished"), ("tokens2560", "never trained")}
    said = "$0.00 is spent, and with s-tokens2560 and the runs under way the total would be $296.67"
    assert ended.stop_reason == f"max_dollars (151.00): {said}"


def test_a_group_without_a_run_costs_as_much(shop: Workshop) -> None:
    """A single run costs 50 dollars, at the price of the whole machine, although the second group is idle. It costs as
    much in the sums of a later command."""
    sweep = make(shop, vary={"random_seed": [1]})
    for _ in range(2):
        assert run(shop, sweep, groups=2, max_dollars=1000.0).spent == 50.0


@pytest.mark.parametrize("is_killed", [False, True])
def test_earlier_commands_have_spent_the_time_of_the_machine(shop: Workshop, is_killed: bool) -> None:
    """Attempts that overlap shared the machine, and an idle group made it no cheaper, whatever the number of groups in
    a later command. Seconds count at the price of their time: here 60 of 100 s are seed1's, at a dollar each, and the
    price has risen to ten dollars since. A killed sweep has logged no duration, but the run has recorded it."""
    sweep = make(shop, vary={"random_seed": [1, 2, 3]})
    add_summary(sweep.runs[0], dollars={"total": 60.0}, seconds={"total": 60.0})
    add_summary(sweep.runs[1], dollars={"total": 70.0}, seconds={"total": 70.0})
    first = attempt("00:00:00", groups=2, took=30.0)
    sweep.runs[0].directory.sweep_log.write_text(attempt("00:00:00", groups=2, took=60.0))
    log = sweep.runs[1].directory.sweep_log
    second = attempt("00:01:00", groups=2, took=None if is_killed else 40.0)
    log.write_text(f"{first}# failed with exit status 1\n{second}")
    for groups in (1, 4):
        ended = run(shop, sweep, groups=groups, max_dollars=100.0)
        assert (ended.stop_reason, ended.spent) == ("max_dollars (100.00) is spent", 100.0)
    assert run(shop, sweep, max_hours=100 / 3600).said == [], "nothing is begun"
    log.write_text(first)
    assert run(shop, sweep, max_dollars=100.0).spent == 100.0, "40 s without a sweep, which were not shared"


def test_several_killed_sweeps_have_spent_their_time(shop: Workshop) -> None:
    """Three sweeps were killed after 20 s, the next one finished the run in 10 s, and another run took 20 s."""
    sweep = make(shop, vary={"random_seed": [1, 2]})
    killed = [attempt(began) for began in ("00:00:00", "00:00:20", "00:00:40")]
    logs = "".join([*killed, attempt("00:01:00", took=10.0)]), attempt("00:01:10", took=20.0)
    for derived, seconds, log in zip(sweep.runs, (70.0, 20.0), logs, strict=True):
        add_summary(derived, dollars={"total": seconds}, seconds={"total": seconds})
        derived.directory.sweep_log.write_text(log)
    assert run(shop, sweep, max_dollars=90.0).spent == 90.0
    sweep.runs[1].directory.sweep_log.write_text("$ python ddp_train.py  # 2026-13-01 00:00:00 UTC\n")
    with pytest.raises(UserError, match=r"sweep.log: 2026-13-01 00:00:00 UTC is no date; correct the line or remove"):
        run(shop, sweep, max_dollars=90.0)


def test_a_run_of_unknown_cost_is_stopped_when_the_budget_is_spent(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the cost of a run is not known in advance, the run is stopped when the budget is spent. The sum includes what
    earlier commands spent. It is taken from the seconds in the metrics, as in compare_runs.py."""
    monkeypatch.setattr("harness.sweeps.run.LOOK_SECONDS", 0.1)
    sweep = make(shop, set={"eps": 2.0}, vary={"random_seed": [1, 2]})
    ended = run(shop, sweep, max_dollars=25.0)
    assert ended.stop_reason == "max_dollars (25.00) is spent"
    assert ended.said[0] == "s-seed1: its cost is not known yet; the run will be stopped when max_dollars is spent"
    assert states(sweep) == {"seed1": "stopped", "seed2": "never trained"}
    assert run(shop, sweep, max_dollars=25.0).said == [], "nothing is begun"


def test_a_run_that_records_nothing_is_stopped_when_the_budget_is_spent(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that starts up, downloads, compiles or is stuck writes no metrics, but spends the budget, because the
    machine is paid for by the clock. The run is stopped when the budget is spent. Two runs at the same time share the
    price of the machine."""
    monkeypatch.setattr("harness.sweeps.run.LOOK_SECONDS", 0.05)
    shop.add_dataset()
    sweep = make(shop, set={"eps": 6.0}, vary={"random_seed": [1, 2]})
    event = TrainEvent(global_step=1, tokens_seen=64, seconds=0.3, loss=2.5, tokens_per_second=64.0)
    MetricsFile(sweep.runs[0].directory.metrics).append(event)
    spent = 3.0
    for groups, limit, names in ((1, 9.0, ["s-seed1"]), (2, 18.0, ["s-seed1", "s-seed2"])):
        began = time.monotonic()
        ended = run(shop, sweep, groups=groups, max_dollars=limit)
        assert ended.stop_reason == f"max_dollars ({limit:.2f}) is spent"
        stopped = {line.split(" after")[0] for line in ended.said[-groups:]}  # in the order in which they ended
        assert stopped == {f"{name}: stopped" for name in names}
        assert limit <= ended.spent <= spent + 15 * (time.monotonic() - began), "not 20 dollars a second"
        spent = ended.spent
    assert run(shop, sweep, groups=2, max_dollars=9.0).said == [], (
        "the first command's attempt counts in later commands"
    )


def test_hours_are_those_of_this_machine_and_of_earlier_commands(shop: Workshop) -> None:
    """The runs under way are stopped when the hours have passed, and no run is begun after that."""
    sweep = make(shop, set={"eps": 2.0}, vary={"random_seed": [1, 2]})
    assert states(sweep) == {"seed1": "never trained", "seed2": "never trained"}
    ended = run(shop, sweep, max_hours=2.0 / 3600)
    assert ended.stop_reason == "max_hours (0.000555556) has passed"
    assert re.fullmatch("s-seed1: stopped after .*, raise the sweep's max_hours or max_dollars", ended.said[-1])
    assert run(shop, sweep, max_hours=1.0 / 3600).said == [], "nothing is begun"


def test_hours_without_a_sweep_do_not_count(shop: Workshop) -> None:
    sweep = make(shop, vary={"random_seed": [1, 2]})
    add_summary(sweep.runs[0], seconds={"total": 7200.0})
    run(shop, sweep, max_hours=1.0)
    assert states(sweep) == {"seed1": "finished", "seed2": "finished"}


def test_the_limits_of_the_file_hold_unless_the_command_gives_others(shop: Workshop) -> None:
    sweep = make(shop, vary={"random_seed": [1]}, max_dollars=1e-9, max_hours=1e-9)
    shop.add_dataset()
    assert (sweep.max_dollars, sweep.max_hours) == (1e-9, 1e-9)
    refused = sweep_command(shop, "run", str(shop.datasets))
    assert re.search(r"max_(hours|dollars) .*(passed|spent)", refused.stdout + refused.stderr)
    job = start(shop, "--max-dollars", "90000", "--max-hours", "9")
    finish([job], expect=0, timeout=PATIENCE_SECONDS)


def test_a_budget_without_a_price_is_refused(shop: Workshop) -> None:
    shop.add_run("base")
    with pytest.raises(UserError, match=r'max_dollars: train\.json of s-seed1 has no "price_per_hour"'):
        run(shop, make(shop, vary={"random_seed": [1]}), max_dollars=5.0)


# Signals, and other processes


@pytest.mark.parametrize("number", STOPPING_SIGNALS)
def test_a_signal_stops_the_runs_with_checkpoints(shop: Workshop, number: int) -> None:
    sweep = make(shop, set={"eps": 2.0}, vary={"random_seed": [1, 2]})
    metrics = shop.runs / "s-seed1" / "metrics.jsonl"
    when(lambda: metrics.exists() and metrics.stat().st_size, lambda: os.kill(os.getpid(), number))
    ended = run(shop, sweep)
    name = signal.Signals(number).name
    assert f"stopped by {name}: waiting for the checkpoints of s-seed1" in ended.said
    assert states(sweep) == {"seed1": "stopped", "seed2": "never trained"}
    assert ended.end[1] == f"1 stopped, 1 never trained (stopped by {name})"
    assert ended.end[-1] == "s-seed2  never trained"
    assert ended.error == str(RunStopped(int(number)))


def test_a_trial_that_an_earlier_version_pruned_is_trained_on(shop: Workshop) -> None:
    sweep = make(shop, vary={"random_seed": [1, 2]})
    add_summary(sweep.runs[0])
    (shop.runs / "s-seed2" / "sweep.log").write_text("# pruned at global step 7\n")
    (shop.runs / "s-seed2" / "sweep-attempts.json").write_text('{"attempts": []}')
    assert run(shop, sweep).error == ""
    assert states(sweep) == {"seed1": "finished", "seed2": "finished"}


def test_every_command_has_the_same_word_for_a_run(shop: Workshop) -> None:
    """Every command prints the same word for the state of a run, and the same dollars, which are those of its
    summary."""
    sweep = make(shop, vary={"random_seed": [1, 2, 3, 4, 5]})
    folders = [each.directory.path for each in sweep.runs]
    add_summary(sweep.runs[0], dollars={"total": 0.0049}, seconds={"total": 176.0})
    event = TrainEvent(global_step=5, tokens_seen=344, seconds=1.0, loss=2.0, tokens_per_second=93.6)
    for folder in folders[1:3]:
        MetricsFile(folder / "metrics.jsonl").append(event)
    start = attempt("00:00:00")
    (folders[2] / "sweep.log").write_text(f"{start}error: out of memory\n# failed with exit status 1\n")
    (folders[3] / "sweep.log").write_text(f"{start}# failed with exit status 1\n{start}")
    (folders[4] / "summary.json").write_text("{")
    (folders[1] / "sweep-attempts.json").write_text('{"exit_status": 1}')
    status = sweep_command(shop, "status").stdout
    told = {line.split("  ")[0]: line.split("  ", 1)[1] for line in status.splitlines() if line.startswith("s-seed")}
    compared = command(shop, "compare_runs.py", *told, "--json")
    runs = {each["name"]: each for each in json.loads(compared.stdout)["runs"]}
    states = {name: each["state"] for name, each in runs.items()}
    assert [states[f"s-seed{seed}"] for seed in (1, 2, 3, 4, 5)] == [
        *("finished", "stopped", "failed", "never trained", "damaged")
    ]
    for name, state in states.items():
        assert told[name].startswith(state)
    assert "176 s, $0.0049" in told["s-seed1"]
    assert runs["s-seed1"]["values"]["dollars"]["value"] == 0.0049
    assert "global step 5, 26 %, loss 2.000" in told["s-seed2"]
    assert "    error: out of memory" in status.splitlines()
    os.utime(folders[2] / "metrics.jsonl", (time.time() + 60,) * 2)
    status = sweep_command(shop, "status").stdout
    assert "\ns-seed3  stopped " in status, "it was continued by hand since"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_sweep_shows_how_far_its_runs_are(shop: Workshop, monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """On a terminal, one line is replaced again and again; elsewhere, a new line is printed from time to time."""
    monkeypatch.setattr("harness.sweeps.run.LOOK_SECONDS", 0.1)
    monkeypatch.setattr("harness.sweeps.run.REPORT_SECONDS", 0.1)
    shop.add_dataset()
    sweep = make(shop, set={"eps": 2.0}, vary={"random_seed": [1, 2]})
    said: list[str] = []
    shown: list[str] = []
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setattr("harness.sweeps.run.say", said.append)
    monkeypatch.setattr("harness.sweeps.run.show", shown.append)
    lines = shown if is_terminal else said
    when(lambda: any("loss 2.500" in line for line in lines), lambda: os.kill(os.getpid(), signal.SIGTERM))
    planner = Planner(shop.datasets, groups=1, processes=1)
    SweepRunner(sweep.runs, planner, shop.path / "in_place.py").run()
    pattern = r"run 1 of 2, s-seed1: global step \d+, \d+ %, loss 2\.500, \d+ s left"
    assert any(re.fullmatch(pattern, line) for line in lines)
    assert bool(shown) is is_terminal


def test_a_sweep_whose_output_was_closed_goes_on(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep whose output is closed trains its runs to the end. Python started by `command >&-` has no sys.stdout."""
    monkeypatch.setattr("harness.sweeps.run.LOOK_SECONDS", 0.0)
    sweep = make(shop, vary={"random_seed": [1]})
    monkeypatch.setattr(sys, "stdout", None)
    runner = SweepRunner(sweep.runs, Planner(shop.datasets, processes=1), shop.path / "in_place.py")
    with one_line_errors():  # as in sweep_runs.py
        runner.run()
        runner.report_end()
    assert states(sweep) == {"seed1": "finished"}


def test_a_run_that_is_being_trained_is_waited_for(shop: Workshop) -> None:
    """A sweep waits for a run that another process trains. The percentage in its status is rounded down: 26.9 % of the
    tokens are shown as 26 %."""
    sweep = make(shop, vary={"random_seed": [1, 2]})
    other = sweep.runs[0].directory
    event = TrainEvent(global_step=5, tokens_seen=344, seconds=1.0, loss=2.0, tokens_per_second=93.6)
    MetricsFile(other.metrics).append(event)
    lock = other.lock()
    status = status_of(sweep.runs[0])
    assert (status.state, status.said) == ("going on", "global step 5, 26 %, loss 2.000, 10 s left")
    when((shop.runs / "s-seed2" / "summary.json").exists, lambda: os.close(lock.descriptor))
    ended = run(shop, sweep)
    assert states(sweep) == {"seed1": "finished", "seed2": "finished"}
    assert ended.said[0] == "s-seed1: is being trained by another process; waiting for it"


def test_a_second_sweep_of_the_same_name_is_refused(shop: Workshop) -> None:
    make(shop, vary={"random_seed": [1]})
    lock = RunLock.take(shop.runs / ".sweep-s.lock", "used for the sweep s")
    another = sweep_command(shop, "run", str(shop.datasets))
    os.close(lock.descriptor)
    another.refuses(f"{shop.runs}: is being used for the sweep s by another process")


def test_damaged_runs_hide_no_others(shop: Workshop) -> None:
    made = make(shop, vary={"random_seed": [1, 2, 3, 4, 5]})
    add_summary(made.runs[0], final_validation_loss=2.5)
    folders = [run.directory.path for run in made.runs]
    (folders[1] / "train.json").write_text('{"dataset": ')
    (folders[2] / "train.json").write_text((folders[2] / "train.json").read_text().replace("random_seed", "x"))
    (folders[3] / "summary.json").write_text('{"seconds": "many"}')
    reasons = {2: "/train.json:1: not valid JSON", 3: '/train.json: key "x": unknown', 4: '/summary.json: key "'}

    def says(done: Result, *parts: object) -> bool:  # wherever lines are broken
        return "".join("".join(map(str, parts)).split()) in "".join(done.stdout.split())

    status = sweep_command(shop, "status")
    planned = sweep_command(shop, "plan", str(shop.datasets), "--assume-tps", "10")
    assert (status.status, status.stderr, planned.status, planned.stderr) == (0, "", 0, "")
    assert max(map(len, status.stdout.splitlines()[1:])) <= 80
    assert says(status, "Sweep s in ", shop.runs, ": 1 finished, 1 never trained, 3 damaged")
    assert says(status, "s-seed1 finished validation loss 2.500")
    assert says(status, "s-seed5 never trained")
    assert says(planned, "Plan of sweep s, 5 runs: nothing is trained or downloaded 1 finished already")
    assert says(planned, "Speed of s-seed5: 10 tokens/s")
    for seed, reason in reasons.items():
        assert says(status, f"s-seed{seed} damaged ", folders[seed - 1], reason)
        assert says(planned, "Cannot be trained: ", folders[seed - 1], reason)
    line = sweep_command(shop, "run", str(shop.datasets)).refuses()
    assert line.startswith(f"error: {folders[1]}/train.json:1: not valid JSON")
    assert not (folders[4] / "sweep.log").exists(), "nothing is trained"


def test_a_summary_that_cannot_be_read_is_told_with_its_remedy(shop: Workshop) -> None:
    sweep = make(shop, vary={"random_seed": [1, 2]})
    spoilt = shop.runs / "s-seed1" / "summary.json"
    spoilt.write_text("{")
    status = status_of(sweep.runs[0])
    assert status.state == "damaged"
    assert status.said.startswith(f"{spoilt}:1: not valid JSON")
    assert "move the file away" in status.said
    ended = run(shop, sweep)
    assert states(sweep) == {"seed1": "damaged", "seed2": "finished"}
    assert not (shop.runs / "s-seed1" / "began").exists(), "it is not trained anew"
    assert spoilt.read_text() == "{"
    assert ended.end[1:3] == ["1 finished, 1 damaged", "s-seed1  damaged"]
    assert ended.error == "1 of 2 runs are damaged and were left as they are"
    spoilt.unlink()
    run(shop, sweep)
    assert states(sweep) == {"seed1": "finished", "seed2": "finished"}
