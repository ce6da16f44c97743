"""Two machines without a shared disk, simulated by namespaces. The time-out is COLLECTIVE_TIMEOUT_SECONDS."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_hub import CORPUS, FakeHub, corpus
from tests.support.launch import ROOT, Result, Workshop, wait_until
from tests.support.same_end import assert_same_end
from tests.support.two_hosts import Host, Pair, two_hosts, wait_for
from tests.support.warm import WarmProcess

TIMEOUT_SECONDS = 8
# Seconds until every process has ended: the time-out, the watchdog's polling interval, the wait for a rank that may
# report more, and torchrun's own wait.
END_SECONDS = TIMEOUT_SECONDS + 30
START_SECONDS = 150  # Python and torch start on each rank, on two cores that may be busy
SETTINGS: dict[str, Any] = {
    "min_train_tokens": 128 * 140,
    "validation_interval": 80,
    "report_interval": 5,
    "learning_rate": 0.01,
    "clipping_max_norm": 0.5,
}

# ddp_train.py with weights that take longer to upload than the watchdog waits for a silent rank
SLOW_UPLOAD = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
import ddp_train
from harness.mirror.store import Mirror
send = Mirror.send

def slowly(mirror, path, *given):
    if path.endswith("model.safetensors"):
        time.sleep({2 * TIMEOUT_SECONDS})
    return send(mirror, path, *given)

Mirror.send = slowly
ddp_train.main()
"""
Start = Callable[[str], list[WarmProcess]]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with two_hosts(tmp_path_factory.mktemp("nodes")) as pair:
        for host in pair.hosts:
            host.shop.environment["COLLECTIVE_TIMEOUT_SECONDS"] = str(TIMEOUT_SECONDS)
            host.shop.add_dataset(tokens=60_000)
        yield pair


@pytest.fixture
def start(pair: Pair, exhaustive: bool) -> Start:
    """Function that starts training on both hosts: with torchrun under --exhaustive, else without it, because torchrun
    takes seconds to start."""
    return pair.torchrun if exhaustive else pair.ranks


@pytest.fixture(autouse=True)
def clean(pair: Pair) -> Iterator[None]:
    """Leave the hosts connected and idle for the next test."""
    yield
    pair.mend()
    for host in pair.hosts:
        host.crash()


@pytest.fixture
def slow_run(pair: Pair, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run "slow-" and the test's name, on both disks, with a mirror to which its weights are uploaded slowly."""
    training = Host.training
    monkeypatch.setattr(Host, "training", lambda host, name: [str(host.work / "slow.py"), *training(host, name)[1:]])
    for host in pair.hosts:
        (host.shop.path / "slow.py").write_text(SLOW_UPLOAD)
    name = f"slow-{request.node.originalname}"
    return add_run(pair, name, min_train_tokens=128 * 400, mirror=f"file://{pair.first.work}/store")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run with the same number of processes, on one machine."""
    shop = Workshop(tmp_path_factory.mktemp("one-host"))
    shop.add_dataset(tokens=60_000)
    run = shop.add_run(**SETTINGS)
    shop.train(ranks=2)
    return run


def add_run(pair: Pair, name: str, **changes: Any) -> Path:
    """Add the same run to both disks; return its folder on the first."""
    first, _ = [host.shop.add_run(name, **SETTINGS | changes) for host in pair.hosts]
    return first


def await_step(run: Path, step: int, processes: Sequence[WarmProcess]) -> None:
    path = run / "metrics.jsonl"
    text = f'"global_step": {step},'
    wait_until(lambda: path.exists() and text in path.read_text(), *processes, seconds=START_SECONDS)


def assert_told(ends: Sequence[Result]) -> None:
    """Assert that every command has failed, and that rank 0's says only that SIGTERM has stopped the run."""
    assert all(end.status != 0 for end in ends), ends
    assert [line.partition(" step")[0] for line in ends[0].error_lines] == ["stopped by SIGTERM after global"], ends


def say_why(ends: Sequence[Result]) -> list[str]:
    """Return the error line of each result. Each command must have failed with exactly one such line, and without a
    traceback of its own."""
    lines = []
    for end in ends:
        assert end.status != 0, end
        assert len(end.error_lines) == 1, end
        assert "Traceback" not in end.stderr.partition("torch/distributed/elastic")[0], end
        lines += end.error_lines
    return lines


@pytest.mark.fault("two nodes", "each downloads the data once; the same end as of four processes on one host")
def test_trains_on_two_nodes(pair: Pair, tmp_path: Path, exhaustive: bool) -> None:
    """With two ranks on each node, each node downloads the dataset once, and rank 0 alone writes results."""
    hubs = [host.at_home(FakeHub) for host in pair.hosts]  # each on its host's own loopback
    with hubs[0], hubs[1], pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair.first.shop, "draws", True)
        for host, hub in zip(pair.hosts, hubs, strict=True):
            host.shop.add_run("r", dataset=CORPUS, min_train_tokens=2560)
            hub.add_dataset(CORPUS, corpus())
            for name, value in hub.environment(host.work / "hf").items():
                patch.setitem(host.shop.environment, name, value)
        start = pair.torchrun("r", processes=2, c10d=True) if exhaustive else pair.ranks("r", processes=2)
        ends = wait_for(start, timeout=START_SECONDS)
        again = wait_for(pair.ranks("r", processes=2), timeout=START_SECONDS)  # only one node has the summary
    assert {end.status for end in [*ends, *again]} == {0}, (ends, again)
    assert "r is finished: " in again[0].stdout
    for hub in hubs:
        assert {file.downloads for file in hub.datasets[CORPUS].files.values()} == {1}
    runs = [host.shop.runs / "r" for host in pair.hosts]
    assert {path.name for path in runs[1].iterdir()} == {"model.json", "train.json"}
    assert {path.name for path in runs[0].iterdir()} >= {"summary.json", "metrics.jsonl", "training-run-chart.png"}
    assert f"written by rank 0 alone, to {pair.first.name}:{pair.first.work}/runs/r; to continue" in ends[0].stdout
    alone = Workshop(tmp_path)
    shutil.copytree(pair.first.shop.datasets, alone.datasets)
    run = alone.add_run("r", dataset=CORPUS, min_train_tokens=2560)
    alone.train(ranks=4)
    assert_same_end(run, runs[0])


@pytest.mark.fault(
    "one node is told to stop", "both nodes stop, with a checkpoint of the last step; resumed to the same end"
)
@pytest.mark.fault("rank 0 on another node than before", "refused; the message names the node that has the checkpoints")
@pytest.mark.fault(
    "the network fails", "both nodes report it and end within the time-out plus 30 s; resumed to the same end"
)
@pytest.mark.fault(
    "a node vanishes", "the other node reports it and ends within the time-out plus 30 s; resumed to the same end"
)
def test_faults_in_turn(pair: Pair, start: Start, straight: Path, exhaustive: bool) -> None:
    """A run reaches the same end after three faults in turn: it is stopped, the network between its nodes fails, and a
    node vanishes.

    SIGTERM goes to one node's torchrun, or to both as a scheduler sends it. Packets are lost without an error, as in a
    broken switch, or the carrier is lost, as with a pulled cable.
    """
    cases = [((1,), pair.drop, 1), ((0,), pair.unplug, 0), ((0, 1), pair.drop, 1)]
    for number, (told, cut, lost) in enumerate(cases if exhaustive else cases[:1]):
        run = add_run(pair, f"faults-{number}")
        processes = start(run.name)
        await_step(run, 20, processes)
        for index in told:
            processes[index].terminate()
        ends = wait_for(processes, timeout=END_SECONDS)
        assert_told(ends)
        step = ends[0].error_lines[0].partition("global step ")[2].partition(";")[0]
        assert (run / "checkpoints" / "latest").resolve().name.endswith(f"-iteration-{step}")
        # Training does not start from scratch when only the order of the nodes has changed.
        line, _ = say_why(wait_for(Pair(pair.second, pair.first).ranks(run.name), timeout=START_SECONDS))
        assert "node-a" in line
        processes = start(run.name)
        await_step(run, 50, processes)
        cut()
        say_why(wait_for(processes, timeout=END_SECONDS))
        pair.mend()
        processes = start(run.name)
        await_step(run, 80, processes)
        pair.hosts[lost].crash()
        ends = wait_for(processes, timeout=END_SECONDS)
        assert ends[lost].status == -signal.SIGKILL
        say_why([ends[1 - lost]])
        checkpoint = (run / "checkpoints" / "latest").resolve().name
        assert not (pair.second.shop.runs / run.name / "checkpoints").exists()
        ends = wait_for(pair.ranks(run.name), timeout=START_SECONDS)
        assert [end.status for end in ends] == [0, 0], ends
        assert f"{run.name}: continuing from {checkpoint}" in ends[0].stdout
        assert_same_end(straight, run)


@pytest.mark.fault(
    "a node is told to stop, or vanishes, under torchrun --max-restarts=2 on both nodes",
    "after the stop, the other node ends for good; after the loss, its ranks are started again, wait, and end",
)
def test_not_restarted_by_torchrun(pair: Pair) -> None:
    run = add_run(pair, "ended", min_train_tokens=128 * 400)
    processes = pair.torchrun(run.name, "--max-restarts=2")
    await_step(run, 20, processes)
    processes[1].terminate()
    ends = wait_for(processes, timeout=END_SECONDS)
    assert_told(ends)
    assert ends[0].stdout.count("starting 2 processes") == 1
    processes = pair.torchrun(run.name, "--max-restarts=2")
    stopped_at = int(ends[0].error_lines[0].partition("global step ")[2].partition(";")[0])
    await_step(run, stopped_at // 5 * 5 + 20, processes)
    pair.second.crash()
    ends = wait_for(processes, timeout=START_SECONDS)
    assert ends[0].stdout.count("starting 2 processes") == 2
    assert "rank 1 has not answered" in ends[0].stderr


@pytest.mark.fault(
    "a node's ranks are refused before they join",
    "the other node says that it waits, ends when nobody has come, and is not started again",
)
def test_a_node_that_does_not_join(pair: Pair) -> None:
    run = add_run(pair, "absent")
    shutil.rmtree(pair.second.shop.runs / run.name)
    patience = START_SECONDS + TIMEOUT_SECONDS + 60
    ends = wait_for(pair.torchrun(run.name, "--max-restarts=1"), timeout=patience)
    assert "no such run" in ends[1].stderr
    assert "rank 0 of 2 waits for the other 1 at 10.77.0.1:29500\n" in ends[0].stderr
    assert "error: rank 1 has not answered in time" in ends[0].stderr
    assert ends[0].stdout.count("starting 2 processes") == 1


@pytest.mark.fault(
    "a node is told to stop, and the last upload takes longer than torchrun's --shutdown-timeout",
    "the upload is finished first; the other node's ranks stop, too, and are not started again",
)
def test_a_long_upload_after_a_stop(pair: Pair, slow_run: Path) -> None:
    processes = pair.torchrun(slow_run.name, "--max-restarts=2", "--shutdown-timeout=2")
    await_step(slow_run, 20, processes)
    processes[1].terminate()
    ends = wait_for(processes, timeout=END_SECONDS + 4 * TIMEOUT_SECONDS)  # of two uploads
    assert_told(ends)
    assert ends[0].stdout.count("starting 2 processes") == 1
    newest = (slow_run / "checkpoints" / "latest").resolve().name
    assert (pair.first.shop.path / "store" / slow_run.name / "checkpoints" / newest / "meta.json").exists(), ends


def test_a_node_that_vanishes_in_its_last_upload(pair: Pair, slow_run: Path) -> None:
    processes = pair.torchrun(slow_run.name, "--shutdown-timeout=100")
    await_step(slow_run, 20, processes)
    processes[0].terminate()
    wait_until(lambda: len(list((slow_run / "checkpoints").glob("2*"))) > 1, processes[0])
    time.sleep(2)
    pair.first.crash()
    assert wait_for(processes, timeout=END_SECONDS)[1].status != 0


@pytest.mark.fault("two nodes whose files differ", "refused with the file, the difference and both hosts named")
def test_other_files_on_one_node(pair: Pair) -> None:
    run, own = add_run(pair, "different"), pair.second.shop
    letters = own.datasets / "local" / "letters"
    usual = shutil.move(letters, letters.with_name("usual"))
    own.add_dataset(tokens=60_000, seed=1)
    lines = [refusal(pair, run.name)]
    shutil.rmtree(letters)
    shutil.move(usual, letters)
    own.add_run("different", **SETTINGS | {"learning_rate": 0.02})
    lines += [refusal(pair, run.name)]
    own.add_run("different", model={"emb_dim": 32}, **SETTINGS)
    lines += [refusal(pair, run.name)]
    differences = {"dataset": "", "train.json": "learning_rate: 0.01 -> 0.02", "model.json": "emb_dim: 16 -> 32"}
    for line, (file, difference) in zip(lines, differences.items(), strict=True):
        assert f"{file}: not the same" in line
        assert difference in line
    assert not (run / "checkpoints").exists()


def test_a_refusal_on_rank_0_is_told_on_both_nodes(pair: Pair) -> None:
    run = add_run(pair, "refused", max_hours=1e-6)
    first, second = say_why(wait_for(pair.ranks(run.name), timeout=START_SECONDS))
    assert 'key "max_hours": start-up alone has reached' in first
    assert "node-a" in second
    assert second.endswith(first.removeprefix("error: "))


def test_the_microbatch_found_is_written_on_both_nodes(pair: Pair) -> None:
    """After -f --write the nodes' train.json are still the same, so that training accepts them."""
    run = add_run(pair, "searched", global_batch_size=8, gradient_accumulation_steps=None)
    ends = wait_for(pair.ranks(run.name, "-f", "--write"), timeout=START_SECONDS)
    assert [end.status for end in ends] == [0, 0], ends
    found = [json.loads((host.shop.runs / run.name / "train.json").read_text()) for host in pair.hosts]
    assert [each["microbatch_size"] for each in found] == [4, 4]


def refusal(pair: Pair, name: str) -> str:
    ends = wait_for(pair.ranks(name), timeout=START_SECONDS)
    line, again = say_why(ends)
    assert line == again
    assert [end.status for end in ends] == [2, 2]
    assert "not the same on node-a (rank 0) and node-b (rank 1)" in line
    return line


@pytest.mark.fault(
    "a rank dies under torchrun --max-restarts=2 on both nodes", "all ranks are started again, and reach the same end"
)
def test_restarted_by_torchrun(pair: Pair, straight: Path, exhaustive: bool) -> None:
    """When a rank dies, the other node's torchrun also starts its ranks again, not necessarily at the same time."""
    cases = [(1, False), (0, True)] if exhaustive else [(1, False)]
    for number, (struck, c10d) in enumerate(cases):
        run = add_run(pair, f"restarted-{number}")
        processes = pair.torchrun(run.name, "--max-restarts=2", c10d=c10d)
        await_step(run, 20, processes)
        (worker,) = pair.hosts[struck].workers()
        os.kill(worker, signal.SIGKILL)
        ends = wait_for(processes, timeout=START_SECONDS)
        assert [end.status for end in ends] == [0, 0], ends
        assert ends[0].stdout.count(f"{run.name}: continuing from") == 1
        assert_same_end(straight, run)
