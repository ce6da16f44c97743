"""Two machines without a shared disk, and the network between them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Evidence
from tests.fake_hub import FakeHub
from tests.launch import Workshop
from tests.test_continuation import assert_same_end
from tests.test_fetching import NAME, corpus
from tests.two_hosts import Pair, two_hosts, wait_for
from tests.warm import WarmProcess

TIMEOUT_SECONDS = 8
# Until every process has ended: the time-out, the watch's own pace, and what torchrun takes to let go of its store.
END_SECONDS = TIMEOUT_SECONDS + 30
START_SECONDS = 120  # Python and torch start four times, on two cores
SETTINGS: dict[str, Any] = {
    "min_train_tokens": 128 * 400,
    "validation_interval": 150,
    "learning_rate": 0.01,
    "clipping_max_norm": 0.5,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with two_hosts(tmp_path_factory.mktemp("nodes")) as pair:
        for host in pair.hosts:
            host.shop.environment["COLLECTIVE_TIMEOUT_SECONDS"] = str(TIMEOUT_SECONDS)
            host.shop.add_dataset(tokens=60_000)
        yield pair


@pytest.fixture(autouse=True)
def clean(pair: Pair) -> Iterator[None]:
    """Whatever a test does to the hosts, the next one finds them connected and idle."""
    yield
    pair.mend()
    for host in pair.hosts:
        host.crash()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to, of as many processes on one machine."""
    shop = Workshop(tmp_path_factory.mktemp("one-host"))
    shop.add_dataset(tokens=60_000)
    run = shop.add_run(**SETTINGS)
    shop.train(ranks=2)
    return run


def add_run(pair: Pair, name: str) -> Path:
    """The same run on both disks; where it is on the first."""
    first, _ = [host.shop.add_run(name, **SETTINGS) for host in pair.hosts]
    return first


def await_step(run: Path, step: int, processes: Sequence[WarmProcess]) -> None:
    path, deadline = run / "metrics.jsonl", time.monotonic() + START_SECONDS
    while f'"global_step": {step},' not in (path.read_text() if path.exists() else ""):
        assert all(process.poll() is None for process in processes), wait_for(processes, timeout=1)
        assert time.monotonic() < deadline, wait_for(processes, timeout=1)
        time.sleep(0.01)


def begin(pair: Pair, name: str, *, torchrun: bool) -> list[WarmProcess]:
    return pair.torchrun(name) if torchrun else pair.ranks(name)


def continue_to_the_end(pair: Pair, run: Path, *, torchrun: bool) -> None:
    """The same commands again, with the checkpoints on the first host's disk alone."""
    checkpoint = (run / "checkpoints" / "latest").resolve().name
    assert not (pair.second.shop.runs / run.name / "checkpoints").exists()
    ends = wait_for(begin(pair, run.name, torchrun=torchrun), timeout=START_SECONDS)
    assert [end.status for end in ends] == [0, 0], ends
    assert f"{run.name}: continuing from {checkpoint}" in ends[0].stdout


@pytest.mark.fault("two nodes")
def test_trains_on_two_nodes(pair: Pair, tmp_path: Path, exhaustive: bool, evidence: Evidence) -> None:
    """Two ranks on each: the dataset comes once to each node, results are written by rank 0 alone."""
    usual = [dict(host.shop.environment) for host in pair.hosts]
    for host in pair.hosts:
        host.shop.add_run("r", dataset=NAME, min_train_tokens=2560)
    hubs = [host.at_home(FakeHub) for host in pair.hosts]  # each on its host's own loopback
    with hubs[0], hubs[1]:
        for host, hub in zip(pair.hosts, hubs, strict=True):
            hub.add_dataset(NAME, corpus())
            host.shop.environment |= {**hub.environment(host.work / "hf"), "HF_HUB_OFFLINE": "0"}
        start = pair.torchrun if exhaustive else pair.ranks
        ends = wait_for(start("r", processes=2), timeout=START_SECONDS)
    for host, environment in zip(pair.hosts, usual, strict=True):
        host.shop.environment = environment
    assert {end.status for end in ends} == {0}, ends
    for hub in hubs:
        assert {file.downloads for file in hub.datasets[NAME].files.values()} == {1}
    runs = [host.shop.runs / "r" for host in pair.hosts]
    assert {path.name for path in runs[1].iterdir()} == {"model.json", "train.json"}
    assert {path.name for path in runs[0].iterdir()} >= {"summary.json", "metrics.jsonl", "training-run-chart.png"}
    assert f"{pair.first.name}:{pair.first.work}/runs/r; to continue later" in ends[0].stdout
    alone = Workshop(tmp_path)
    shutil.copytree(pair.first.shop.datasets, alone.datasets)
    run = alone.add_run("r", dataset=NAME, min_train_tokens=2560)
    alone.train(ranks=4)
    assert_same_end(run, runs[0])
    evidence(
        injected="nothing: two hosts with a network and a disk each, two processes on each",
        times=1,
        outcome="each host downloads the dataset once; host of rank 0 has all results, and says so; the end is that of "
        "four processes on one host, bit for bit",
    )


@pytest.mark.fault("one torchrun is told to stop")
def test_stopped_and_continued(pair: Pair, straight: Path, exhaustive: bool, evidence: Evidence) -> None:
    """SIGTERM to one node's torchrun, or to both as a scheduler sends it."""
    cases = [(1,), (0,), (0, 1)] if exhaustive else [(1,)]
    for told in cases:
        run = add_run(pair, f"stopped-{len(told)}-{told[0]}")
        processes = pair.torchrun(run.name)
        await_step(run, 50, processes)
        for index in told:
            processes[index].terminate()
        ends = wait_for(processes, timeout=END_SECONDS)
        assert all(end.status != 0 for end in ends), ends
        assert ends[0].stderr.count("stopped by SIGTERM after global step") == 1, ends
        continue_to_the_end(pair, run, torchrun=exhaustive)
        assert_same_end(straight, run)
    evidence(
        injected="SIGTERM to one node's torchrun" + (", or to both" if exhaustive else ""),
        times=len(cases),
        outcome="all processes stop at the same step with a checkpoint on rank 0's disk; the same commands continue, "
        "and the end is that of a run that never stopped, bit for bit",
    )


DIFFERENCES = ["train.json", "model.json", "dataset"]


@pytest.mark.fault("a node with other files")
def test_other_files_on_the_second_node(pair: Pair, evidence: Evidence) -> None:
    runs = {host.name: host.shop.runs / "different" for host in pair.hosts}
    for what in DIFFERENCES:
        add_run(pair, "different")
        dataset = pair.second.shop.datasets / "local"
        if what == "train.json":
            pair.second.shop.add_run("different", **SETTINGS | {"learning_rate": 0.02})
        elif what == "model.json":
            pair.second.shop.add_run("different", model={"emb_dim": 32}, **SETTINGS)
        else:
            shutil.move(dataset / "letters", dataset / "usual")
            pair.second.shop.add_dataset(tokens=60_000, seed=1)
        ends = wait_for(pair.ranks("different"), timeout=START_SECONDS)
        if what == "dataset":
            shutil.rmtree(dataset / "letters")
            shutil.move(dataset / "usual", dataset / "letters")
        for end in ends:
            assert end.status == 2, end
            (line,) = end.error_lines
            assert what in line
            assert "node-b (rank 1)" in line
    assert not any((run / "checkpoints").exists() for run in runs.values())
    evidence(
        injected="the second node has another train.json, model.json or dataset of the same name",
        times=len(DIFFERENCES),
        outcome="refused before the first step by one line on each node, naming the file, the difference and the host",
    )


@pytest.mark.fault("the network fails")
def test_network_cut(pair: Pair, straight: Path, exhaustive: bool, evidence: Evidence) -> None:
    """Cut without a word, as by a switch that fails, or with the carrier gone, as by a pulled cable."""
    slowest, cuts = 0.0, [pair.drop, pair.unplug] if exhaustive else [pair.drop]
    for cut in cuts:
        run = add_run(pair, f"cut-{cut.__name__}")
        processes = pair.torchrun(run.name)
        await_step(run, 50, processes)
        cut()
        slowest = max(slowest, seconds_to_the_end(processes))
        pair.mend()
        continue_to_the_end(pair, run, torchrun=exhaustive)
        assert_same_end(straight, run)
    evidence(
        injected=f"all packets between the nodes lost in the middle of training, COLLECTIVE_TIMEOUT_SECONDS="
        f"{TIMEOUT_SECONDS}" + ("; or the cable pulled" if exhaustive else ""),
        times=len(cuts),
        outcome=f"both sides say what is wrong and end, within {slowest:.0f} s, torchrun included; with the network "
        "back the same commands continue to the same end, bit for bit",
    )


def seconds_to_the_end(processes: Sequence[WarmProcess]) -> float:
    """How long both sides take to end, saying why."""
    began = time.monotonic()
    ends = wait_for(processes, timeout=END_SECONDS)
    seconds = time.monotonic() - began
    for end in ends:
        assert end.status != 0, end
        assert len(end.error_lines) == 1, end.stderr
    return seconds
