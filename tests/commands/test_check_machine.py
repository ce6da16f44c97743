"""check_machine.py on CPUs, with real ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.training.machine_check import DeviceRates, slow_rates, table
from tests.nullcuda.device import environment, why_not
from tests.support.http_server import http_server
from tests.support.isolation import ROOT
from tests.support.launch import Result, Workshop, finish, rank_variables
from tests.support.planning import rows
from tests.support.warm import WarmProcess

# Shorter than for a user. SECONDS stays longer than the pauses of a rank that is slowed down.
HASTE = """
import harness.training.machine_check as check
check.SECONDS, check.EXCHANGE_SECONDS = {seconds}, 0.02
check.DISK_BYTES, check.DISK_PART_BYTES, check.DOWNLOAD_BYTES = 2**24, 2**22, 2**22
"""


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path, environment={"HF_HUB_OFFLINE": "1"})
    made.add_run("r")
    return made


def start(
    shop: Workshop, *arguments: str, ranks: int = 1, seconds: float = 0.2, prelude: str = ""
) -> list[WarmProcess]:
    """Start the ranks. Rank 1, or a process without others, runs the Python source `prelude` first."""
    command = [str(ROOT / "check_machine.py"), *arguments, "--runs-dir", str(shop.runs)]
    haste = HASTE.format(seconds=seconds)
    return [
        shop.fork(command, place, haste + (prelude if place.get("RANK") != "0" else ""))
        for place in rank_variables(ranks)
    ]


def check(shop: Workshop, *arguments: str, ranks: int = 1, expect: int | None = None, prelude: str = "") -> Result:
    return finish(start(shop, *arguments, ranks=ranks, prelude=prelude), expect=expect, timeout=200)


@pytest.mark.slow
def test_a_slow_rank_is_named(shop: Workshop) -> None:
    """Rank 1 is stopped for most of the time."""
    processes = start(shop, ranks=2, seconds=2.0)
    is_over = threading.Event()

    def slow_down() -> None:
        while not is_over.wait(0.02):
            try:
                os.kill(processes[1].pid, signal.SIGSTOP)
                is_over.wait(0.06)
                os.kill(processes[1].pid, signal.SIGCONT)
            except ProcessLookupError:
                return

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        result = finish(processes, expect=1, timeout=200)
    finally:
        is_over.set()
        thread.join()
    error = next(line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert "rank 1 (" in error
    assert "products" in error
    assert "% below the median" in error
    assert "rank 0" not in error


def test_the_table_of_gpus_fits_a_terminal() -> None:
    rates = [DeviceRates("box", "NVIDIA H100 80GB HBM3", 7 * 2**34, 5 * 2**34, "bf16", flops, 2.79e12, 54.3e9)
             for flops in (712e12, 705e12, 633e12)]  # fmt: skip
    lines = list(table(rates))
    assert max(map(len, lines)) <= 80
    assert lines[-1].split()[6:] == ["80.0", "633", "(64%", "of", "peak)", "2,790", "54.3"]
    assert list(slow_rates(rates)) == [(2, "products")]
    assert slow_rates(rates[1:]) == {(1, "products"): pytest.approx(1 - 633 / 705)}, "of two ranks, beside the faster"
    assert not slow_rates(rates[:2])


@pytest.mark.slow
def test_a_rank_that_is_slow_once_is_not_named(shop: Workshop) -> None:
    """Rank 1 sleeps for most of the first measurement. Other programs may slow it down later, but not as much."""
    result = check(
        shop,
        ranks=2,
        prelude="""
import time
measure, wait, calls = check.measure_device, check.wait_for, []
check.measure_device = lambda world: (calls.append(0), measure(world))[1]
check.wait_for = lambda device: (wait(device), time.sleep(0.2 if len(calls) == 1 else 0))
""",
    )
    assert "all-reduce of 2 ranks" in result.stdout
    assert not re.search(r"[89]\d% below the median", result.stderr), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("place", ["wait_for", "measure_training"])
def test_an_error_of_one_device_is_one_line(shop: Workshop, place: str) -> None:
    broken = f"""
def fail(*arguments):
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered\\nSearch for more")
check.{place} = fail
"""
    job = start(shop, "r", ranks=2, prelude=broken)
    finish(job[:1], expect=1, timeout=200)  # rank 0 ends, too
    result = finish(job[1:], expect=1, timeout=200)
    line = result.refuses("error: rank 1 (", status=1)
    assert line.endswith(
        "cpu): CUDA error: uncorrectable ECC error encountered; if that happens again, rent another machine"
    )


TRAINING = "from harness.training.step import OptimizerStep\nOptimizerStep.accumulate"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["check.wait_for", TRAINING])
def test_a_device_that_hangs_is_named(shop: Workshop, place: str) -> None:
    shop.environment["COLLECTIVE_TIMEOUT_SECONDS"] = "3"
    prelude = f"import time\n{place} = lambda *arguments: time.sleep(600)\n"
    job = start(shop, *(["r"] if place == TRAINING else []), ranks=2, prelude=prelude)
    result = finish(job, expect=1, timeout=200)
    (line,) = result.error_lines
    assert "rank 1 (" in line
    assert "in the check of the machine" in line


def test_a_full_disk_is_one_line(shop: Workshop) -> None:
    limit = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
    result = check(shop, prelude=limit)
    result.refuses(f"error: {shop.runs}: File too large while the disk was measured", status=1)
    assert [path.name for path in shop.runs.iterdir()] == ["r"]


@pytest.mark.slow
def test_the_speed_is_kept_for_the_plan(shop: Workshop) -> None:
    shop.add_dataset()
    result = check(shop, "r", ranks=2)
    assert "all-reduce of 2 ranks, bus GB/s: 1 MiB " in result.stdout
    assert f"diskat{shop.runs / 'r'}:writes" in "".join(result.stdout.split()), "a long path is wrapped"
    assert "not measured: HF_HUB_OFFLINE is set" in result.stdout
    kept = json.loads((shop.runs / "r" / "machine-check.json").read_text())
    assert f"training r: {kept['tokens_per_second']:,.0f} tokens/s" in result.stdout
    assert rows(shop, "r", ranks=2)["speed"].startswith(f"{kept['tokens_per_second']:,.0f} tokens/s")
    assert "machine-check.json" in rows(shop, "r", ranks=2)["speed"]
    assert "machine-check.json" not in str(rows(shop, "r", ranks=1)), "another number of ranks"
    measured = {**kept, "tokens_per_second": 12345.0}
    (shop.runs / "r" / "summary.json").write_text(json.dumps(measured))
    assert rows(shop, "r", ranks=2, restart=True)["speed"].startswith("12,345 tokens/s"), "measured by training itself"
    assert {path.name for path in (shop.runs / "r").iterdir()} == {
        *("model.json", "train.json", "machine-check.json", "summary.json")
    }
    shop.add_run("other")
    (shop.runs / "r" / "summary.json").rename(shop.runs / "other" / "summary.json")
    assert "r/machine-check.json" in rows(shop, "r", ranks=2)["speed"], "rather than another run, maybe elsewhere"
    assert rows(shop, "other", ranks=2, restart=True)["speed"].startswith("12,345 tokens/s")


def test_the_download(shop: Workshop) -> None:
    with http_server(lambda *_: (200, bytes(2**22))) as hub:
        shop.environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub}
        assert f"download from {hub}: " in (result := check(shop, expect=0)).stdout
    assert "MB/s over one connection" in result.stdout
    shop.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    assert "http://127.0.0.1:9: not measured: " in check(shop, expect=0).stdout


def test_wrong_input_is_one_line(shop: Workshop) -> None:
    for arguments, named in (
        (["none"], "no such run"),
        (["r", "more"], "unexpected extra argument"),
        (["--processes", "0"], "--processes"),
        (["r", "--processes", "100000"], "at most"),
    ):
        check(shop, *arguments, expect=2).refuses(named)
    shop.runs.rename(shop.path / "elsewhere")
    assert "--runs-dir" in check(shop, expect=2).stderr


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_on_the_null_device(shop: Workshop) -> None:
    """No rate there means anything; everything runs that runs on a GPU."""
    haste = HASTE.format(seconds=0.1) + "check.BELIEVED_SECONDS = 1.0\n"
    program = f"{haste}from tests.nullcuda import command\ncommand.main('check_machine.py')"
    arguments = ["r", "--runs-dir", str(shop.runs)]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment(gib=8.0) | {"HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "% of peak" in done.stdout
    assert "training r: " in done.stdout
