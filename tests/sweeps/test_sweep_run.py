"""Running a sweep: real runs, and, for what would take long, a program in ddp_train.py's place that does as its
settings say.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import RunError, UserError
from harness.common.files import sha256
from harness.common.json_files import read_json_object
from harness.runs.metrics import MetricsFile, TrainEvent
from harness.sweeps.attempt import training_command
from harness.sweeps.derived_runs import write_runs
from harness.sweeps.plan import AssumedSpeed, MachineUse, Planner
from harness.sweeps.run import STOPPING_SIGNALS, Ends, SweepRunner, describe_ends, leave
from harness.sweeps.standing import Standing, describe_standings, standing_of
from harness.sweeps.sweep import SweepRuns
from tests.support.isolation import ROOT
from tests.support.launch import Process, Workshop, finish, metrics
from tests.support.sweeping import add_summary, load, sweep_command, when
from tests.support.warm import FORK_PYTHONS

PATIENCE_SECONDS = 100

# By `eps`: 1 fails; 2 goes on until it is asked to stop, a second of training with every line; 3 waits for its
# neighbour; others are finished at once.
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
step = 0
while eps == 2:
    step += 1
    event = {"event": "train", "global_step": step, "tokens_seen": 64 * step, "seconds": step, "loss": 2.5}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**event, "tokens_per_second": 64.0}) + "\\n")
    time.sleep(0.01)
while eps == 3 and len(list(run.parent.glob("*/began"))) < 2:
    time.sleep(0.01)
model = json.loads((run / "model.json").read_text())
summary = {"device": "none", "world_size": 1, "final_validation_loss": 1.5, "seconds": {"total": 1.0}, "train": train}
summary["dollars"] = {"total": 10.0}
(run / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_run("base", price_per_hour=36_000.0)  # ten dollars a second
    (tmp_path / "in_place.py").write_text(IN_PLACE_OF_TRAINING)
    return made


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A runner listens to signals from then on."""
    before = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def make(shop: Workshop, **keys: Any) -> SweepRuns:
    sweep = load(shop, **keys)
    write_runs(sweep.missing())
    return sweep


def run(shop: Workshop, sweep: SweepRuns, groups: int = 1, max_dollars: float | None = None) -> tuple[Ends, list[str]]:
    """Run the sweep; return how the runs end, and the lines said meanwhile."""
    planner = Planner(MachineUse(shop.datasets, groups, 1), AssumedSpeed().options(shop.runs))
    said: list[str] = []
    return SweepRunner(sweep.runs, planner, shop.path / "in_place.py", max_dollars).run(said.append), said


def log_of(shop: Workshop, name: str) -> str:
    return (shop.runs / name / "sweep.log").read_text()


def test_one_after_the_other_until_all_are_finished(shop: Workshop) -> None:
    sweep = make(shop, vary={"random_seed": [1, 2]})
    ends, said = run(shop, sweep)
    assert ends == Ends(finished=["s-seed1", "s-seed2"])
    assert [line.split(":")[0] for line in said] == ["s-seed1", "s-seed1", "s-seed2", "s-seed2"]
    assert "s-seed2: finished, validation loss 1.500" in said[3]
    command = " ".join(training_command(shop.path / "in_place.py", sweep.runs[0], MachineUse(shop.datasets, 1, 1)))
    assert log_of(shop, "s-seed1").splitlines()[1].startswith(f"$ {command}  # 20")
    again, said = run(shop, sweep)
    assert (again, said) == (Ends(), [])
    assert "Nothing to do: all runs are finished" in describe_ends(again, sweep.runs)


def test_a_run_of_several_processes(shop: Workshop) -> None:
    sweep = make(shop, vary={"random_seed": [1]})
    words = training_command(Path("ddp_train.py"), sweep.runs[0], MachineUse(Path("data"), 1, 8))
    run = ["ddp_train.py", "s-seed1", "data", "--runs-dir", str(shop.runs)]
    assert words == [sys.executable, *run, "--processes", "8"]


def test_a_failed_run_stops_no_other_and_is_tried_again(shop: Workshop) -> None:
    sweep = make(shop, vary={"eps": [1.0, 4.0, 5.0]})
    ends, _ = run(shop, sweep)
    assert ends == Ends(finished=["s-eps4.0", "s-eps5.0"], failed=["s-eps1.0"])
    said = describe_ends(ends, sweep.runs)
    assert said.startswith("\n2 finished, 1 failed\n")
    assert log_of(shop, "s-eps1.0").endswith("\n# failed with exit status 1\n")
    assert said.splitlines()[-3:] == [
        "    it is 1.0",
        "    something went before",
        "    error: the disk is full of \\x1b[31mred",
    ]
    standings = [standing_of(each) for each in sweep.runs]
    assert [each.state for each in standings] == ["failed", "finished", "finished"]
    assert "    error: the disk is full of \\x1b[31mred" in describe_standings("s", standings, shop.runs).splitlines()
    (shop.path / "in_place.py").write_text(IN_PLACE_OF_TRAINING.replace("eps == 1", "False"))
    assert run(shop, sweep)[0] == Ends(finished=["s-eps1.0"])
    assert standing_of(sweep.runs[0]).state == "finished"
    assert log_of(shop, "s-eps1.0").count("\n$ ") == 2


def test_what_training_would_refuse_has_failed_without_a_start(shop: Workshop) -> None:
    shop.add_dataset()
    sweep = make(shop, vary={"min_train_tokens": [10**9, 1280]})
    ends, said = run(shop, sweep)
    assert ends == Ends(finished=["s-tokens1280"], failed=["s-tokens1000000000"])
    assert "the train split of local/letters is too short" in said[0]
    assert "too short" in describe_ends(ends, sweep.runs).splitlines()[-1]


def test_groups_run_at_the_same_time(shop: Workshop) -> None:
    """Each of the two waits for the other; alone it would wait forever."""
    shop.add_dataset()
    sweep = make(shop, set={"eps": 3.0}, vary={"random_seed": [1, 2]})
    ends, said = run(shop, sweep, groups=2)
    assert sorted(ends.finished) == ["s-seed1", "s-seed2"]
    assert "started on group 1" in said[0]
    assert "started on group 2" in said[1]


def test_one_run_fetches_a_dataset_and_the_others_wait(shop: Workshop) -> None:
    """Without the dataset they do not run at the same time."""
    sweep = make(shop, vary={"random_seed": [1, 2]})
    _, said = run(shop, sweep, groups=2)
    assert [line.split(":")[0] for line in said] == ["s-seed1", "s-seed1", "s-seed2", "s-seed2"]


# Money


def test_a_run_that_the_budget_does_not_hold_is_not_begun(shop: Workshop) -> None:
    """The plan is (1280 + 160) tokens at 96 a second: 15 s, and 150 dollars."""
    sweep = make(shop, vary={"random_seed": [1, 2, 3]})
    add_summary(sweep.runs[0], dollars={"total": 20.0})
    ends, said = run(shop, sweep, max_dollars=169.0)
    assert (ends.not_begun, said) == (["s-seed2", "s-seed3"], [])
    assert ends.reason == "--max-dollars 169.00: $20.00 are spent, and with s-seed2 they would be $170.00"
    ends, _ = run(shop, sweep, max_dollars=171.0)
    assert (ends.finished, ends.not_begun) == (["s-seed2"], ["s-seed3"]), "what seed 2 has cost counts"
    assert not (shop.runs / "s-seed3" / "sweep.log").exists()


def test_the_plans_of_runs_under_way_are_counted(shop: Workshop) -> None:
    """The budget holds two of three runs at a time; no third is begun although next to nothing is spent yet."""
    shop.add_dataset()
    sweep = make(shop, set={"eps": 3.0}, vary={"random_seed": [1, 2, 3, 4]})
    add_summary(sweep.runs[0], dollars={"total": 0.0})
    ends, _ = run(shop, sweep, groups=3, max_dollars=149.0)
    assert (len(ends.finished), ends.not_begun) == (2, ["s-seed4"])


def test_a_run_of_unknown_cost_is_stopped_when_the_budget_is_spent(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget counts by the run's own clock, as compare_runs.py does."""
    monkeypatch.setattr("harness.sweeps.run.LOOK_SECONDS", 0.1)
    sweep = make(shop, set={"eps": 2.0}, vary={"random_seed": [1, 2]})
    ends, said = run(shop, sweep, max_dollars=25.0)
    assert (ends.stopped, ends.not_begun, ends.failed) == (["s-seed1"], ["s-seed2"], [])
    assert ends.reason == "--max-dollars 25.00 are spent"
    assert said[0] == "s-seed1: what it costs is not known yet; it is stopped when the budget is spent"
    assert standing_of(sweep.runs[0]).state == "stopped"
    again, _ = run(shop, sweep, max_dollars=25.0)
    assert again.not_begun == ["s-seed1", "s-seed2"], "what was spent before counts"


def test_the_command_ends_with_what_is_left(shop: Workshop) -> None:
    sweep = make(shop, vary={"random_seed": [1, 2]})
    add_summary(sweep.runs[0], dollars={"total": 20.0})
    done = sweep_command(shop, "run", str(shop.datasets), "--max-dollars", "169")
    assert done.status == 1
    reason = "--max-dollars 169.00: $20.00 are spent, and with s-seed2 they would be $170.00"
    assert done.stderr == f"error: 1 of 2 runs are left: {reason}\n"
    assert done.stdout.splitlines()[0] == "Sweep s: 1 of 2 runs are to be trained"


def test_a_budget_without_a_price_is_refused(shop: Workshop) -> None:
    shop.add_run("base")
    with pytest.raises(UserError, match=r'--max-dollars: train\.json of s-seed1 has no "price_per_hour"'):
        run(shop, make(shop, vary={"random_seed": [1]}), max_dollars=5.0)


# Signals, and others at work


@pytest.mark.parametrize("number", STOPPING_SIGNALS)
def test_a_signal_stops_the_runs_with_checkpoints(shop: Workshop, number: int) -> None:
    sweep = make(shop, set={"eps": 2.0}, vary={"random_seed": [1, 2]})
    when((shop.runs / "s-seed1" / "began").exists, lambda: os.kill(os.getpid(), number))
    ends, said = run(shop, sweep)
    assert (ends.stopped, ends.not_begun, ends.signal) == (["s-seed1"], ["s-seed2"], number)
    assert f"stopped by {signal.Signals(number).name}: waiting for the checkpoints of s-seed1" in said
    assert standing_of(sweep.runs[0]).state == "stopped"
    assert describe_ends(ends, sweep.runs).splitlines()[-1] == "s-seed2  never trained"


def test_totals_are_those_of_the_whole_sweep(shop: Workshop) -> None:
    sweep = make(shop, vary={"eps": [4.0, 2.0, 5.0, 1.0]})
    add_summary(sweep.runs[0])
    when((shop.runs / "s-eps2.0" / "metrics.jsonl").exists, lambda: os.kill(os.getpid(), signal.SIGINT))
    stopped, _ = run(shop, sweep)
    said = describe_ends(stopped, sweep.runs)
    assert said.startswith("\n1 finished, 1 stopped, 2 never trained (stopped by SIGINT)\n")
    (shop.path / "in_place.py").write_text(IN_PLACE_OF_TRAINING.replace("eps == 2", "False"))
    assert describe_ends(run(shop, sweep)[0], sweep.runs).startswith("\n3 finished, 1 failed\n")
    (shop.runs / "s-eps1.0" / "sweep.log").write_text("# pruned at global step 7\n")
    assert describe_ends(Ends(), sweep.runs) == "\nNothing to do: all runs are finished or pruned"
    assert describe_ends(Ends(reason="spent"), sweep.runs, 2) == "\n3 finished, 1 pruned, 2 not made (spent)"


def test_every_command_has_the_same_word_for_a_run(shop: Workshop) -> None:
    """Every command has the same dollars, too: those of the summary."""
    sweep = make(shop, vary={"random_seed": [1, 2, 3, 4, 5]})
    folders = [each.run.path for each in sweep.runs]
    add_summary(sweep.runs[0], dollars={"total": 0.0049}, seconds={"total": 176.0})
    event = TrainEvent(global_step=5, tokens_seen=344, seconds=1.0, loss=2.0, tokens_per_second=93.6)
    for folder in folders[1:3]:
        MetricsFile(folder / "metrics.jsonl").append(event)
    start = "$ python ddp_train.py  # 2026-01-01 00:00:00 UTC\n"
    (folders[2] / "sweep.log").write_text(f"{start}error: out of memory\n# failed with exit status 1\n")
    (folders[3] / "sweep.log").write_text(f"{start}# failed with exit status 1\n{start}")
    (folders[4] / "summary.json").write_text("{")
    (folders[1] / "sweep-attempts.json").write_text('{"exit_status": 1}')
    status = sweep_command(shop, "status").stdout
    told = {line.split("  ")[0]: line.split("  ", 1)[1] for line in status.splitlines() if line.startswith("s-seed")}
    arguments = [str(ROOT / "compare_runs.py"), *told, "--runs-dir", str(shop.runs), "--json"]
    compared = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=60)
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


def test_a_run_under_way_is_shown_with_the_time_left(shop: Workshop) -> None:
    """26.9 % of the tokens are 26 %."""
    (made,) = make(shop, vary={"random_seed": [1]}).runs
    event = TrainEvent(global_step=5, tokens_seen=344, seconds=1.0, loss=2.0, tokens_per_second=93.6)
    MetricsFile(made.run.metrics).append(event)
    lock = made.run.lock()
    assert standing_of(made) == Standing(made, "going on", "global step 5, 26 %, loss 2.000, 10 s left")
    os.close(lock.descriptor)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_sweep_shows_how_far_its_runs_are(shop: Workshop, monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """On a terminal in one line that is replaced, elsewhere in a line now and then."""
    monkeypatch.setattr("harness.sweeps.run.LOOK_SECONDS", 0.1)
    monkeypatch.setattr("harness.sweeps.run.REPORT_SECONDS", 0.1)
    shop.add_dataset()
    sweep = make(shop, set={"eps": 2.0}, vary={"random_seed": [1, 2]})
    planner = Planner(MachineUse(shop.datasets, 1, 1), AssumedSpeed().options(shop.runs))
    said: list[str] = []
    shown: list[str] = []
    lines = shown if is_terminal else said
    when(lambda: any("loss 2.500" in line for line in lines), lambda: os.kill(os.getpid(), signal.SIGTERM))
    runner = SweepRunner(sweep.runs, planner, shop.path / "in_place.py", None)
    runner.run(said.append, shown.append if is_terminal else None)
    pattern = r"run 1 of 2, s-seed1: global step \d+, \d+ %, loss 2\.500, \d+ s left"
    assert any(re.fullmatch(pattern, line) for line in lines)
    assert bool(shown) is is_terminal


def test_a_run_that_another_process_trains_is_waited_for(shop: Workshop) -> None:
    sweep = make(shop, vary={"random_seed": [1, 2]})
    program = (
        "import sys, time, pathlib; from harness.runs.directory import RunDirectory\n"
        "lock = RunDirectory(pathlib.Path(sys.argv[1])).lock(); print('taken', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", program, str(shop.runs / "s-seed1")]
    other = subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdout.readline()
    assert standing_of(sweep.runs[0]).state == "going on"
    when((shop.runs / "s-seed2" / "summary.json").exists, other.stdin.close)
    ends, said = run(shop, sweep)
    other.wait(PATIENCE_SECONDS)
    other.stdout.close()
    assert ends == Ends(finished=["s-seed2", "s-seed1"])
    assert said[0] == "s-seed1: is being trained by another process; waiting for it"


# Real runs


def begin(shop: Workshop, *options: str) -> Process:
    """Its runs, torchrun and ranks included, are forked from it."""
    words = [str(ROOT / "sweep_runs.py"), "run", str(shop.path / "s.json"), str(shop.datasets), *options]
    return shop.fork([*words, "--runs-dir", str(shop.runs)], {}, FORK_PYTHONS)


def wait_for_steps(shop: Workshop, name: str, process: Process) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    path = shop.runs / name / "metrics.jsonl"
    while not path.exists() or len(metrics(path.parent)) < 3:
        assert process.poll() is None, process.communicate(timeout=10)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def weights(shop: Workshop, name: str) -> str:
    return sha256(shop.runs / name / "checkpoints" / "latest" / "model.safetensors")


def test_real_runs_from_the_file_to_the_losses(shop: Workshop) -> None:
    shop.add_dataset()
    sweep = make(shop, together=[{"random_seed": 1}, {"initial_weights": "missing.safetensors"}])
    done = finish([begin(shop, "--groups", "2")], expect=1, timeout=PATIENCE_SECONDS)
    assert done.error_lines == ["error: 1 of 2 runs failed; the same command tries them again"]
    assert "1 finished, 1 failed" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("    error: ")
    assert "missing.safetensors" in done.stdout.splitlines()[-1]
    loss = read_json_object(shop.runs / "s-seed1" / "summary.json")["final_validation_loss"]
    status = sweep_command(shop, "status").stdout
    assert f" finished validation loss {loss:.3f}" in " ".join(status.split())
    assert standing_of(sweep.runs[1]).state == "failed"


LONG = {"min_train_tokens": 64 * 150, "validation_interval": 50}


@pytest.mark.slow
def test_killed_and_started_again_it_ends_as_if_nothing_had_happened(shop: Workshop) -> None:
    """The training of a killed sweep ends, too, with a checkpoint, and the sweep goes on from there."""
    shop.add_dataset(tokens=20_000)
    shop.add_run("base", **LONG)
    make(shop, vary={"random_seed": [1, 2]})
    first = begin(shop, "--processes", "2")
    wait_for_steps(shop, "s-seed1", first)
    first.kill()
    second = begin(shop, "--processes", "2")
    stdout, stderr = second.communicate(timeout=PATIENCE_SECONDS)
    assert second.returncode == 0, stdout + stderr
    assert "2 finished" in stdout
    assert log_of(shop, "s-seed1").count("\n$ ") == 2
    assert "stopped by SIGTERM" in log_of(shop, "s-seed1")
    shop.add_run("straight", random_seed=1, **LONG)
    shop.train("straight", ranks=2)
    assert weights(shop, "s-seed1") == weights(shop, "straight")


@pytest.mark.slow
def test_ctrl_c_and_a_second_sweep_at_the_same_time(shop: Workshop) -> None:
    shop.add_dataset(tokens=20_000)
    shop.add_run("base", **LONG)
    make(shop, vary={"random_seed": [1, 2]})
    process = begin(shop)
    wait_for_steps(shop, "s-seed1", process)
    second = sweep_command(shop, "run", str(shop.datasets))
    assert second.status == 2
    assert f"{shop.runs}: is being used for the sweep s by another process" in second.stderr
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, stderr) == (130, "")
    assert "s-seed1  stopped    global step " in stdout
    assert "s-seed2  never trained" in stdout
    assert (shop.runs / "s-seed1" / "checkpoints" / "latest" / "model.safetensors").exists()
    status = sweep_command(shop, "status").stdout
    assert "s-seed1  stopped    global step " in status
    assert "s-seed2  never trained" in status


def test_runs_that_are_missing_are_made(shop: Workshop) -> None:
    shop.add_dataset()
    make(shop, vary={"random_seed": [1]})
    (shop.path / "s.json").write_text(json.dumps({"base": "base", "vary": {"random_seed": [1, 2]}}))
    assert "s-seed2  not made" in sweep_command(shop, "status").stdout
    done = finish([begin(shop)], expect=0, timeout=PATIENCE_SECONDS)
    assert (shop.runs / "s-seed2" / "summary.json").exists()
    assert done.stdout.endswith(
        f"Next:\n  uv run test_loss.py {shop.datasets} 's-*' --runs-dir {shop.runs}\n"
        f"  uv run compare_runs.py 's-*' --baseline s-seed1 --runs-dir {shop.runs}\n"
    )
    (shop.runs / "s-another").mkdir()
    again = sweep_command(shop, "run", str(shop.datasets))
    assert "Nothing to do: all runs are finished" in again.stdout
    assert "sweep.log" not in again.stdout, "nothing is printed into it"
    planned = sweep_command(shop, "plan", str(shop.datasets)).stdout
    assert planned.endswith("2 finished already\n")
    assert f"test_loss.py {shop.datasets} s-seed1 s-seed2 --runs-dir" in again.stdout, "a pattern would name others"


def spoil(shop: Workshop, name: str) -> None:
    """One of the runs of each kind that cannot be read."""
    spoilt = shop.runs / name
    kind = int(name.removeprefix("s-seed"))
    if kind == 2:
        (spoilt / "train.json").write_text('{"dataset": ')
    elif kind == 3:
        (spoilt / "train.json").write_text((spoilt / "train.json").read_text().replace('"random_seed": 3', '"x": 3'))
    elif kind == 4:
        (spoilt / "summary.json").write_text('{"seconds": "many"}')
    elif kind == 5:
        shutil.rmtree(spoilt)
        spoilt.write_text("a file")
    else:
        shop.add_run(name, learning_rate=0.5)


def test_one_damaged_run_hides_no_other(shop: Workshop) -> None:
    made = make(shop, vary={"random_seed": [1, 2, 3, 4, 5, 6, 7]})
    add_summary(made.runs[0], final_validation_loss=2.5)
    for kind in (2, 3, 4, 5, 6):
        spoil(shop, f"s-seed{kind}")

    def says(*parts: object) -> bool:  # wherever lines are broken
        return "".join("".join(map(str, parts)).split()) in "".join(done.stdout.split())

    done = sweep_command(shop, "status")
    assert (done.status, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines()[1:])) <= 80
    assert says("Sweep s in ", shop.runs, ": 1 finished, 1 never trained, 5 damaged")
    assert says("s-seed1 finished validation loss 2.500")
    assert says("s-seed7 never trained")
    assert says("s-seed2 damaged ", shop.runs, "/s-seed2/train.json:1: not valid JSON")
    assert says("s-seed3 damaged ", shop.runs, '/s-seed3/train.json: key "x": unknown')
    assert says("s-seed4 damaged ", shop.runs, '/s-seed4/summary.json: key "')
    assert says("s-seed5 damaged ", shop.runs, "/s-seed5: is a file")
    assert says("s-seed6 damaged ", shop.runs, "/s-seed6: there is another run of this name")

    done = sweep_command(shop, "plan", str(shop.datasets), "--assume-tps", "10")
    assert (done.status, done.stderr) == (0, "")
    assert says("Plan of sweep s, 7 runs")
    assert says("1 finished already")
    assert says("Speed of all 1 runs")
    for name in ("s-seed2", "s-seed3", "s-seed4", "s-seed5", "s-seed6"):
        assert says("Cannot be trained: ", shop.runs, "/", name)

    done = sweep_command(shop, "run", str(shop.datasets))
    assert done.status == 2
    assert done.stderr.startswith(f"error: {shop.runs}/s-seed2/train.json:1: not valid JSON")
    assert not (shop.runs / "s-seed7" / "sweep.log").exists(), "nothing is trained"


def test_a_plan_whose_only_run_left_is_damaged_shows_the_finished_ones(shop: Workshop) -> None:
    made = make(shop, vary={"random_seed": [1, 2]})
    add_summary(made.runs[0])
    (shop.runs / "s-seed2" / "train.json").write_text("{")
    done = sweep_command(shop, "plan", str(shop.datasets))
    assert done.status == 0
    assert "1 finished already" in done.stdout
    assert "Cannot be trained: " in done.stdout


def test_a_summary_that_cannot_be_read_is_told_with_its_remedy(shop: Workshop) -> None:
    made = make(shop, vary={"random_seed": [1, 2]})
    run(shop, made)
    (shop.runs / "s-seed2" / "summary.json").unlink()
    spoilt = shop.runs / "s-seed1" / "summary.json"
    spoilt.write_text("{")
    standing = standing_of(made.runs[0])
    assert standing.state == "damaged"
    assert standing.said.startswith(f"{spoilt}:1: not valid JSON")
    assert "move it away" in standing.said

    (shop.runs / "s-seed1" / "began").unlink()
    ends, _ = run(shop, made)
    assert ends == Ends(finished=["s-seed2"], damaged={"s-seed1": standing.said})
    assert not (shop.runs / "s-seed1" / "began").exists(), "it is not trained anew"
    assert spoilt.read_text() == "{"
    with pytest.raises(RunError, match="1 of 2 runs are damaged"):
        leave(ends, made.runs)
    assert describe_ends(ends, made.runs).startswith("\n1 finished, 1 damaged\ns-seed1  damaged\n")

    spoilt.unlink()
    ends, _ = run(shop, made)
    assert not ends.damaged
    assert standing_of(made.runs[0]).state == "finished"


@pytest.mark.slow
def test_a_real_summary_that_is_moved_away_is_written_again(shop: Workshop) -> None:
    made = make(shop, vary={"random_seed": [1]})
    shop.add_dataset()
    assert sweep_command(shop, "run", str(shop.datasets)).status == 0
    place = shop.runs / "s-seed1"
    before = read_json_object(place / "summary.json")
    weights_before = weights(shop, "s-seed1")
    (place / "summary.json").write_text("{")
    assert standing_of(made.runs[0]).state == "damaged"
    refused = sweep_command(shop, "run", str(shop.datasets))
    assert refused.status == 2, "it is the only run"
    assert "move it away and train again: it is written anew" in refused.stderr
    (place / "summary.json").rename(place / "away")
    assert sweep_command(shop, "run", str(shop.datasets)).status == 0
    after = read_json_object(place / "summary.json")
    assert (after["final_validation_loss"], weights(shop, "s-seed1")) == (
        before["final_validation_loss"],
        weights_before,
    )
