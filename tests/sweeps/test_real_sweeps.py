"""Running a sweep whose runs really train."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from harness.common.json_files import read_json_object
from harness.sweeps.plan import status_of
from tests.support.launch import Process, Workshop, finish, metrics, wait_until, weights_of
from tests.support.sweeping import load, log_of, make, start, states, sweep_command

PATIENCE_SECONDS = 100


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_run("base", price_per_hour=36_000.0)  # ten dollars a second
    return made


def wait_for_steps(shop: Workshop, name: str, process: Process, lines: int) -> None:
    """Wait until the run's metrics.jsonl has that many lines."""
    run = shop.runs / name
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) >= lines, process)


def test_real_runs_from_the_file_to_the_losses(shop: Workshop) -> None:
    """`sweep_runs.py run` makes missing runs and trains all. The last lines that it prints are commands to run next.
    These name the runs by a pattern if the pattern matches no other run."""
    shop.add_dataset()
    entries = [{"random_seed": 1}, {"min_train_tokens": 10**9}]
    sweep = make(shop, together=entries[:1])
    folders = [run.directory.path for run in load(shop, together=entries).runs]
    assert "s-tokens1000000000 not made" in " ".join(sweep_command(shop, "status").stdout.split())
    done = finish([start(shop, "--groups", "2")], expect=1, timeout=PATIENCE_SECONDS)
    assert done.error_lines == ["error: 1 of 2 runs have not finished; the same command tries them again"]
    assert "1 finished, 1 failed" in done.stdout
    errors = [line for line in done.stdout.splitlines() if line.startswith("    error: ")]
    assert "the train split of local/letters is too short" in errors[0]
    loss = read_json_object(folders[0] / "summary.json")["final_validation_loss"]
    assert f" finished validation loss {loss:.3f}" in " ".join(sweep_command(shop, "status").stdout.split())
    load(shop, together=entries[:1])
    again = sweep_command(shop, "run", str(shop.datasets))
    assert "\n1 finished\n" in again.stdout
    assert "sweep.log" not in again.stdout, "nothing is printed into it"
    assert f"test_loss.py {shop.datasets} s-seed1 --runs-dir" in again.stdout, "a pattern would name others"
    assert sweep_command(shop, "plan", str(shop.datasets)).stdout.endswith("1 finished already\n")
    shutil.rmtree(folders[1])
    assert sweep_command(shop, "run", str(shop.datasets)).stdout.endswith(
        f"Next:\n  uv run test_loss.py {shop.datasets} 's-*' --runs-dir {shop.runs}\n"
        f"  uv run compare_runs.py 's-*' --baseline s-seed1 --runs-dir {shop.runs}\n"
    )
    assert states(sweep) == {"seed1": "finished"}


# A clock of the sweep that shows 100 s from a run's first report, so that the test need not wait for its budget.
AFTER_THE_FIRST_REPORT = """
from harness.sweeps import run
run.Attempt.seconds = lambda attempt: 100.0 * attempt.run.directory.metrics.is_file()
"""


def test_a_real_run_that_reports_no_more_is_stopped_with_a_checkpoint(shop: Workshop) -> None:
    never = dict.fromkeys(("report_interval", "validation_interval", "checkpoint_interval"), 100_000)
    shop.add_dataset(tokens=2_000_000)
    shop.add_run("base", price_per_hour=36_000.0, min_train_tokens=1_900_000, **never)
    sweep = make(shop, vary={"random_seed": [1]})
    job = start(shop, "--max-dollars", "900", prelude=AFTER_THE_FIRST_REPORT)
    done = finish([job], expect=1, timeout=PATIENCE_SECONDS)
    (line,) = done.error_lines
    assert line.startswith(
        "error: 1 of 1 runs are left: max_dollars (900.00) is spent; to continue, raise the sweep's "
    )
    assert "max_dollars (900.00) is spent: waiting for the checkpoints of s-seed1" in done.stdout.splitlines()
    stopped = re.search(r"stopped by SIGTERM after global step (\d+);", log_of(shop, "s-seed1"))
    assert stopped
    latest = shop.runs / "s-seed1" / "checkpoints" / "latest"
    assert latest.resolve().name.endswith(f"-iteration-{stopped[1]}")
    seconds = read_json_object(latest / "meta.json")["seconds"]
    # A run that was stopped after the step of its first checkpoint has a later line about that checkpoint.
    took = max(sum(seconds.values()), metrics(shop.runs / "s-seed1")[-1]["seconds"])
    rounding = 10 * 0.0005  # metrics.jsonl has the seconds to a millisecond, and a second costs 10 dollars
    assert status_of(sweep.runs[0]).dollars == pytest.approx(10 * took, abs=rounding), "the last report cost less"


@pytest.mark.slow
def test_stopped_and_killed_it_ends_as_if_nothing_had_happened(shop: Workshop) -> None:
    """Ctrl-C stops the run with a checkpoint, and so does a kill of the sweep's process. The next sweep resumes the
    run, which ends with the same weights as a run that never stopped."""
    long = {"min_train_tokens": 64 * 150, "validation_interval": 50}
    shop.add_dataset(tokens=20_000)
    shop.add_run("base", **long)
    make(shop, vary={"random_seed": [1, 2]})
    first = start(shop, "--processes", "2")
    wait_for_steps(shop, "s-seed1", first, 3)
    first.send_signal(signal.SIGINT)
    stdout, stderr = first.communicate(timeout=PATIENCE_SECONDS)
    assert (first.returncode, stderr) == (130, "")
    assert "s-seed1  stopped    global step " in stdout
    assert "s-seed2  never trained" in stdout
    assert (shop.runs / "s-seed1" / "checkpoints" / "latest" / "model.safetensors").exists()
    second = start(shop, "--processes", "2")
    wait_for_steps(shop, "s-seed1", second, len(metrics(shop.runs / "s-seed1")) + 3)
    second.kill()
    second.wait(PATIENCE_SECONDS)  # the system releases the lock when it has removed the process
    third = start(shop, "--processes", "2")
    stdout, stderr = third.communicate(timeout=PATIENCE_SECONDS)
    assert third.returncode == 0, stdout + stderr
    assert "2 finished" in stdout
    log = log_of(shop, "s-seed1")
    assert (log.count("\n$ "), log.count("stopped by SIGTERM")) == (3, 2)
    shop.add_run("straight", random_seed=1, **long)
    shop.train("straight", ranks=2)
    assert weights_of(shop.runs / "s-seed1") == weights_of(shop.runs / "straight")
