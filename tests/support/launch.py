"""Small runs, and ways to run the real commands on them, for the end-to-end tests."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from harness.common.json_files import strict_json
from tests.support.isolation import SHIPPED_RUNS
from tests.support.warm import FORK_PYTHONS, WarmProcess, warm_server
from tests.support.warm import ROOT as ROOT

Process = subprocess.Popen[str] | WarmProcess
DATASET = "local/letters"
TORCHRUN = ["-m", "torch.distributed.run"]  # the real torchrun, as arguments of Python
PATIENCE_SECONDS = 240  # for commands that take two seconds on an idle machine; less than pytest's own timeout

# A model that trains at thousands of tokens per second on one core, with every part of a large one.
MODEL: dict[str, Any] = {
    "vocab_size": 64,
    "context_length": 16,
    "emb_dim": 16,
    "n_heads": 2,
    "n_layers": 2,
    "drop_rate": 0.1,
    "qkv_bias": True,
}
TRAIN: dict[str, Any] = {
    "dataset": DATASET,
    "microbatch_size": 2,
    "min_train_tokens": 1280,
    "start_train_token": 0,
    "validation_interval": 5,
    "validation_batches": 3,
    "start_val_token": 0,
    "gradient_accumulation_steps": 2,
    "report_interval": 3,
}
# Checkpoints are saved at steps 0, 2, 4, …; those at steps 0, 4, 8, … are validated and may become the best.
SAVED_OFTEN: dict[str, Any] = {
    "validation_interval": 4,
    "checkpoint_interval": 2,
    "report_interval": 2,
    "learning_rate": 0.01,
}


@dataclass
class Workshop:
    """Folder with the runs and datasets of one test.

    Charts are drawn only if `draws` is True, because the process that draws takes longer than the small runs.
    """

    path: Path
    environment: dict[str, str] = field(default_factory=dict)
    draws: bool = False

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def datasets(self) -> Path:
        return self.path / "datasets"

    def add_run(self, name: str = "r", *, model: Any = None, **train: Any) -> Path:
        """Write a run directory with MODEL and TRAIN, and return it. Given keys are changed (`model` is a dict), or
        removed if their value is None."""
        folder = self.runs / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, values in (("model", MODEL | (model or {})), ("train", TRAIN | train)):
            kept = {key: value for key, value in values.items() if value is not None}
            (folder / f"{file}.json").write_text(json.dumps(kept, indent=4))
        return folder

    def add_shipped_run(self, name: str, **train: Any) -> Path:
        """Copy one of the repository's runs, with some keys of train.json changed. Return the copy's folder."""
        folder = Path(shutil.copytree(SHIPPED_RUNS / name, self.runs / name, dirs_exist_ok=True))
        given = json.loads((folder / "train.json").read_text())
        (folder / "train.json").write_text(json.dumps(given | train))
        return folder

    def add_dataset(self, name: str = DATASET, *, tokens: int = 4000, seed: int = 0, largest: int = 63) -> Path:
        """Write a dataset with structure to learn, and return its folder. Each token is the one before it plus a small
        step."""
        folder = self.datasets / name
        folder.mkdir(parents=True)
        random = np.random.default_rng(seed)
        for split, count in (("train", tokens), ("validation", 500), ("test", 500)):
            steps = random.integers(0, 4, count)
            save_file({"tokens": (np.cumsum(steps) % (largest + 1)).astype(np.uint16)}, folder / f"{split}.safetensors")
        meta = {"description": "letters", "token_dtype": "uint16", "files": ["train.safetensors"]}
        (folder / "meta.json").write_text(json.dumps(meta))
        return folder

    def train(self, *arguments: str, ranks: int = 2, expect: int | None = 0, prelude: str = "") -> Result:
        """Run ddp_train.py on `ranks` processes to its end."""
        return finish(self.start(*arguments, ranks=ranks, prelude=prelude), expect=expect, timeout=PATIENCE_SECONDS)

    def attempt(self, *arguments: str, run: str = "r", environment: dict[str, str] | None = None) -> Result:
        """Run ddp_train.py on one process, and return its result, whatever its exit status."""
        return self.command("ddp_train.py", *self._arguments((run, *arguments)), environment=environment)

    def start(self, *arguments: str, ranks: int = 2, prelude: str = "") -> Sequence[Process]:
        """Start ddp_train.py's processes as torchrun does, without the seconds that torchrun itself takes to start.

        `prelude` is Python source that runs in each process first. Tests inject their faults with it.
        """
        command = [str(ROOT / "ddp_train.py"), *self._arguments(arguments)]
        return [self.fork(command, place, prelude) for place in rank_variables(ranks)]

    def fork(self, command: list[str], variables: dict[str, str], prelude: str = "") -> WarmProcess:
        """Start one of the repository's scripts in a process that has already imported torch."""
        return warm_server().spawn(command, self.path, self.variables(variables), prelude, draws=self.draws)

    def torchrun(self, *arguments: str, expect: int | None = 0) -> Result:
        """Run ddp_train.py on two ranks under the real torchrun. torchrun is a forked process, and forks its ranks."""
        command = [*TORCHRUN, "--standalone", "--nproc_per_node=2", str(ROOT / "ddp_train.py")]
        process = self.fork([*command, *self._arguments(arguments)], {}, FORK_PYTHONS)
        return finish([process], expect=expect, timeout=PATIENCE_SECONDS)

    def start_processes(self, *arguments: str) -> Process:
        """Start ddp_train.py with --processes 2 as a user does. Each rank starts Python and imports torch itself."""
        command = [sys.executable, str(ROOT / "ddp_train.py"), *self._arguments(arguments), "--processes", "2"]
        return self.spawn(command, {})

    def script(self, name: str, *arguments: str) -> Result:
        """Run another of the repository's commands, which must succeed."""
        result = self.command(name, *arguments)
        assert result.status == 0, result
        return result

    def command(self, name: str, *arguments: str, environment: dict[str, str] | None = None) -> Result:
        """Run one of the repository's commands, and return its result, whatever its exit status."""
        return finish(
            [self.fork([str(ROOT / name), *arguments], environment or {})], expect=None, timeout=PATIENCE_SECONDS
        )

    def _arguments(self, arguments: tuple[str, ...]) -> list[str]:
        name = arguments[0] if arguments else "r"
        return [name, str(self.datasets), *arguments[1:], "--runs-dir", str(self.runs)]

    def spawn(self, command: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
        """Start a process in its own session, with one thread and without access to the Hub."""
        return subprocess.Popen(
            command,
            cwd=self.path,
            env=self.variables(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def variables(self, more: dict[str, str]) -> dict[str, str]:
        """Return the environment of a process of this workshop: without access to the Hub, and with `more` variables.
        Those of a launcher are not inherited (tests/support/isolation.py)."""
        return {**os.environ, "HF_HUB_OFFLINE": "1", **more, **self.environment}


@dataclass(frozen=True)
class Result:
    """Result of a command: rank 0's exit status, and everything that all ranks printed."""

    status: int
    stdout: str
    stderr: str

    @property
    def error_lines(self) -> list[str]:
        """Return the lines of standard error in which the program says why it ended."""
        return [line for line in self.stderr.splitlines() if line.startswith(("error:", "stopped"))]

    def refuses(self, *words: str, status: int = 2) -> str:
        """Assert that a command ended with nothing on standard error but one line, which has every one of `words`.
        Return the line."""
        assert self.status == status, self
        assert "Traceback" not in self.stderr, self
        (line,) = filter(str.strip, self.stderr.splitlines())
        assert line.startswith("error: "), line
        for word in words:
            assert word in line, f"{word!r} is not in: {line}"
        return line


def finish(processes: Sequence[Process], *, expect: int | None, timeout: float) -> Result:
    """Wait for all processes of a job. As torchrun does, end the other ranks when rank 0 fails."""
    outputs: list[tuple[int, str, str]] = []
    try:
        for process in processes:
            if outputs and outputs[0][0] != 0:
                process.send_signal(signal.SIGTERM)
            stdout, stderr = process.communicate(timeout=timeout)
            assert process.returncode is not None
            outputs.append((process.returncode, stdout, stderr))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate(timeout=10)
    result = Result(outputs[0][0], "".join(out for _, out, _ in outputs), "".join(err for _, _, err in outputs))
    assert expect is None or result.status == expect, f"exit status {result.status}\n{result.stdout}\n{result.stderr}"
    return result


def _own_ports() -> list[int]:
    """Return the ports of this pytest worker in random order. They are below the ports that the system hands out."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    first = 15_000 + 2_000 * worker
    return random.SystemRandom().sample(range(first, first + 2_000), 2_000)


PORTS = itertools.cycle(_own_ports())


def free_port() -> int:
    """Return a free port that no other job of these tests is about to take."""
    for port in itertools.islice(PORTS, 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def rank_variables(ranks: int, *, address: str = "127.0.0.1", hosts: int = 1) -> list[dict[str, str]]:
    """Return the environment variables that torchrun sets for each of `ranks` processes, as many on each host. A single
    process needs none."""
    if ranks == 1:
        return [{}]
    local_size = ranks // hosts
    shared = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(local_size)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank % local_size)} for rank in range(ranks)]


def wait_until(condition: Callable[[], object], *processes: Process, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until `condition()` is true, at most for some seconds. Fails if one of the processes ends before that."""
    deadline = time.monotonic() + seconds
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate(timeout=1)
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def summary_of(run: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json."""
    return json.loads((run / "summary.json").read_text())


def meta_of(run: Path) -> dict[str, Any]:
    """Return the content of meta.json in a run's latest checkpoint."""
    return json.loads((run / "checkpoints" / "latest" / "meta.json").read_text())


def weights_of(run: Path) -> bytes:
    """Return the bytes of the weights in a run's latest checkpoint."""
    return (run / "checkpoints" / "latest" / "model.safetensors").read_bytes()


def metrics(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl, or only those of the events of one kind. A line that is not strict
    JSON fails the test."""
    events = [strict_json(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if kind in (None, event.get("event"))]


# Values that differ between two runs that do the same work.
TIMES = {"seconds", "dollars", "tokens_per_second", "mfu"}


def without_times(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in event.items() if key not in TIMES} for event in events]
