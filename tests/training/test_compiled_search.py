"""The search for the largest microbatch of a model that is compiled: programs and probes counted, with the memory of a
device pretended, and with real programs of a tiny model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn import functional as F

import gpt
from harness.common.errors import UserError
from harness.data.dataset import Dataset
from harness.distributed.world import World
from harness.model.config import load_model_config
from harness.planning.experiment import Experiment
from harness.runs.directory import RunDirectory
from harness.runs.train_config import load_train_config
from harness.training import batch_size_finder, microbatch_probe, startup
from harness.training.compiled_probe import (
    CONFIRMING_STEPS,
    MOST_PROBES,
    MOST_PROGRAMS,
    PROBE_STEPS,
    CompiledProbe,
    find_compiled,
)
from harness.training.step import OptimizerStep, build_step
from tests.support.launch import DATASET, Workshop

ALONE = World(0, 0, 1, 1, torch.device("cpu"))
GIB = 2**30


class Meter:
    """A PeakMeter that is told."""

    def __init__(self) -> None:
        self.peak = 0.0

    def begin(self) -> None: ...

    def peak_bytes(self) -> int:
        return int(self.peak)


@dataclass
class Pretended(CompiledProbe):
    """On a device whose programs are not run: they take `memory(size)` bytes of the search's, `own(size)` of training's
    own, and `widths` are the sizes from which on the search needs another program."""

    memory: Callable[[int], float] = lambda size: size
    own: Callable[[int], float] = lambda size: size
    widths: tuple[int, ...] = ()
    tried: list[tuple[int, bool]] = field(default_factory=list)
    compiled: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._meter = Meter()  # type: ignore[assignment]

    def fits_here(self, microbatch_size: int) -> bool:
        self.tried.append((microbatch_size, self.is_confirming))
        assert (microbatch_size, self.is_confirming) not in self.tried[:-1], "each size is tried once"
        if self.is_confirming:
            self.compiled.add(("own", microbatch_size))
        else:
            program = ("any", sum(microbatch_size >= width for width in self.widths))
            self._needs_program = program not in self.compiled and len(self.compiled) == MOST_PROGRAMS - 1
            if self._needs_program:
                return False
            self.compiled.add(program)
        self._meter.peak = (self.own if self.is_confirming else self.memory)(microbatch_size)  # type: ignore[attr-defined]
        return self._meter.peak <= self.limit_bytes  # type: ignore[attr-defined]

    def _programs_here(self) -> int:
        return len(self.compiled)


@pytest.fixture(autouse=True, scope="module")
def quick_release() -> Iterator[None]:
    """Looking through all objects of the process takes longer than anything else here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbatch_probe, "release_memory", lambda device: None)
        yield


def pretended(limit: float, **more: Any) -> Pretended:
    tokens: Any = None
    return Pretended(lambda: pytest.fail("nothing is built"), ALONE, tokens, 0, 1024, limit_bytes=limit, **more)


@given(
    st.integers(1, 900),
    st.floats(0.05, 2.0),
    st.floats(0.0, 6.0),
    st.floats(0.0, 0.05),
    st.floats(0.95, 1.05),
    st.integers(1, 5000),
)
def test_programs_and_probes_are_few_whatever_the_answer(
    answer: int, slope: float, fixed: float, bend: float, own: float, ceiling: int
) -> None:
    """Memory on a line, bent a little by gaps between blocks, and a program of training's own that takes up to 5 % more
    or less than the search's."""

    def memory(size: int) -> float:
        return (fixed + slope * size + bend * math.sin(size)) * GIB

    limit = (fixed + slope * (answer + 0.5) + bend) * GIB
    probe = pretended(limit, memory=memory, own=lambda size: memory(size) * own)
    found = find_compiled(probe, ceiling)
    asked = [size for size, is_own in probe.tried if not is_own]
    assert len(probe.compiled) <= MOST_PROGRAMS
    assert len(asked) <= MOST_PROBES
    assert len(probe.tried) - len(asked) <= MOST_PROGRAMS - 1
    assert all(size <= ceiling for size, _ in probe.tried)
    if found.size and not found.remark:
        assert probe.tried[-1] == (found.size, True), "what is reported has fitted as training compiles it"
        assert memory(found.size) * own <= limit
    fitting = [size for size in asked if memory(size) <= limit]
    assert found.size >= max([1, *fitting]) * (15 / 16) ** 2 - 2 or not found.size, "a sixteenth smaller, twice"
    if own <= 1:
        assert found.remark == ""
        assert found.size >= min(answer, ceiling) * 63 / 64 - 1, "no more is left lying than the search may leave"


def test_the_steps_of_a_search_are_those_of_the_promise() -> None:
    """Under two minutes on an H200 by the docstring's arithmetic: seconds a sequence and seconds a compilation times
    what a search has really done, for the answer that is expected there and for all around it."""
    for answer in range(1, 700, 7):
        probe = pretended((3.7 + 0.352 * (answer + 0.5)) * GIB, memory=lambda size: (3.7 + 0.352 * size) * GIB)
        probe.own = lambda size: (3.7 + 0.36 * size) * GIB
        find_compiled(probe, 10**6)
        steps = sum(size * (CONFIRMING_STEPS if is_own else PROBE_STEPS) for size, is_own in probe.tried) + 2
        seconds = 30 * len(probe.compiled) + steps * 2 * 1024 / 400_000
        assert seconds < 120, (answer, probe.tried)


@pytest.mark.parametrize("widths", [(5,), (300,), (512,), (5, 300), (5, 512), (3, 4, 5, 6, 7, 8, 9, 33)])
def test_sizes_that_need_another_program(widths: tuple[int, ...]) -> None:
    """The search continues with the second, and never compiles a third; the rest is decided by the line."""
    memory = {"memory": lambda size: 2.0 * size + 100, "own": lambda size: 2.0 * size + 100}
    probe = pretended(1000.0, widths=widths, **memory)
    assert find_compiled(probe, 10**6).size in range(440, 451)
    assert len(probe.compiled) <= MOST_PROGRAMS


def test_seconds_of_compiling_are_not_expected_of_the_next_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a search on the CPU ends early, because it takes a step for minutes long."""
    now = 0.0
    monkeypatch.setattr(microbatch_probe, "time", SimpleNamespace(monotonic=lambda: now))

    class Slow(Pretended):
        def fits_here(self, microbatch_size: int) -> bool:
            nonlocal now
            programs = len(self.compiled)
            fits = super().fits_here(microbatch_size)
            now += 0.01 * microbatch_size + 120 * (len(self.compiled) - programs)
            return fits

    probe = Slow(*(lambda: None, ALONE, None, 0, 1024), limit_bytes=1000.0, widths=(100,))  # type: ignore[arg-type]
    probe._began = now
    found = find_compiled(probe, 10**6)
    assert (found.size in range(984, 1001), found.remark) == (True, "")


def test_a_size_that_training_compiles_to_more_is_stepped_down_from_once() -> None:
    probe = pretended(100.0, memory=lambda size: size, own=lambda size: 1.05 * size)
    assert find_compiled(probe, 10**6).size == 94
    assert [size for size, is_own in probe.tried if is_own] == [100, 94]
    hopeless = pretended(100.0, memory=lambda size: size, own=lambda size: 3.0 * size)
    found = find_compiled(hopeless, 10**6)
    assert len(hopeless.compiled) == MOST_PROGRAMS
    assert (found.size, "not tried" in found.remark) == (89, True)


def test_nothing_fits() -> None:
    probe = pretended(0.5)
    assert find_compiled(probe, 100).size == 0
    assert probe.tried == [(2, False), (1, True)]


def test_data_for_one_sequence_need_one_program() -> None:
    probe = pretended(100.0)
    assert find_compiled(probe, 1).size == 1
    assert probe.tried == [(1, True)]


class Reached(Exception):  # noqa: N818
    """The memory is looked at."""


def test_a_gpu_has_its_exchange_buffers_before_its_memory_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def reach(*_: Any) -> None:
        raise Reached

    monkeypatch.setattr(World, "exchange_once", lambda self, count: done.append(count))
    monkeypatch.setattr(batch_size_finder, "largest_with_data", lambda *_: 100)
    monkeypatch.setattr(batch_size_finder, "release_memory", lambda device: done.append("released"))
    monkeypatch.setattr(batch_size_finder, "limit_memory", reach)
    nothing: Any = SimpleNamespace(config=None)
    for device, wanted in (("cuda:3", [2**26, "released"]), ("cpu", [])):
        done.clear()
        with pytest.raises(Reached):
            batch_size_finder.find_max_microbatch(
                nothing, World(3, 3, 8, 8, torch.device(device)), nothing, nothing, None
            )
        assert done == wanted


def test_another_process_on_a_gpu_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shop = Workshop(tmp_path)
    experiment = Experiment.load(RunDirectory(shop.add_run()), shop.datasets)
    monkeypatch.setattr(startup, "taken_by_others", lambda device: "another process holds about 35.2 GiB of GPU 3")
    startup.remark_on_machine(experiment, ALONE)
    assert capsys.readouterr().out == "note: another process holds about 35.2 GiB of GPU 3\n"


# Real programs. Tracing is real, and so is autograd's part; the kernels are not compiled, which would take a minute.
BACKEND = "aot_eager"


@dataclass
class Limited(CompiledProbe):
    """Real steps, on a device that holds so many sequences."""

    holds: int = 10**9
    sizes: list[int] = field(default_factory=list)

    def fits_here(self, microbatch_size: int) -> bool:
        self.sizes.append(microbatch_size)
        return super().fits_here(microbatch_size) and microbatch_size <= self.holds


class Calls:
    """Counter of calls of the model's loss that no compiler saw."""

    def __init__(self) -> None:
        self.uncompiled = 0

    def plain(
        self, features_NxC: torch.Tensor, weight_VxC: torch.Tensor, targets_N: torch.Tensor, *, softcap: None
    ) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.uncompiled += 1
        return F.cross_entropy(F.linear(features_NxC, weight_VxC), targets_N)

    def in_chunks(
        self, features_NxC: torch.Tensor, weight_VxC: torch.Tensor, targets_N: torch.Tensor, *, softcap: None
    ) -> torch.Tensor:
        """A loop over rows, which holds for one number of them only."""
        if not torch.compiler.is_compiling():
            self.uncompiled += 1
        logits = F.linear(features_NxC, weight_VxC)
        parts = [F.cross_entropy(logits[i : i + 64], targets_N[i : i + 64]) for i in range(0, len(targets_N), 64)]
        return torch.stack(parts).mean()


@pytest.fixture
def calls() -> Iterator[Calls]:
    torch._dynamo.reset()
    counters.clear()
    yield Calls()
    torch._dynamo.reset()


def limited(tmp_path: Path, holds: int) -> Limited:
    shop = Workshop(tmp_path)
    shop.add_dataset(tokens=20_000)
    run = shop.add_run(model={"n_layers": 1}, compile=True)
    config = load_train_config(run / "train.json")

    def build() -> OptimizerStep:
        model = gpt.GPTModel(load_model_config(run / "model.json"))
        model.compile(backend=BACKEND)
        return build_step(model, model, config)

    tokens = Dataset.open(shop.datasets, DATASET).split("train")
    return Limited(build, ALONE, tokens, 0, 16, accumulation_steps=2, holds=holds, backend=BACKEND)


@pytest.mark.parametrize("holds", [1, 2, 37, 333])
def test_real_programs_are_few_and_nothing_runs_without(
    holds: int, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt, "linear_cross_entropy", calls.plain)
    probe = limited(tmp_path, holds)
    found = find_compiled(probe, 1000)
    assert holds - holds // 64 <= found.size <= holds
    assert counters["stats"]["unique_graphs"] == probe.programs == 2, "the search's, and training's own"
    assert calls.uncompiled == 0
    assert f"compiled 2 times; {probe.steps} steps" in probe.describe()
    assert all(len(set(sizes)) == len(sizes) for sizes in (probe.sizes[:-1],))


def test_a_model_that_needs_a_program_for_each_size(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search ends before the third, and nothing is computed without a program."""
    monkeypatch.setattr(gpt, "linear_cross_entropy", calls.in_chunks)
    probe = limited(tmp_path, 37)
    assert find_compiled(probe, 1000).size in range(8, 38)
    assert counters["stats"]["unique_graphs"] == probe.programs == MOST_PROGRAMS
    assert calls.uncompiled == 0


def test_one_gpu_with_one_microbatch_a_step_holds_no_gradients_between_steps(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients are dropped as in training there, though the search does not call the bare model."""
    monkeypatch.setattr(gpt, "linear_cross_entropy", calls.plain)
    probe = limited(tmp_path, 2)
    probe.accumulation_steps = 1
    assert probe.fits(2)
    assert probe._step is not None
    assert all(each.grad is None for each in probe._step.bare_model.parameters())


def test_a_compiler_that_fails_is_one_line(calls: Calls, tmp_path: Path) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    probe = limited(tmp_path, 37)
    probe.backend = broken
    with pytest.raises(
        UserError, match=r'^train.json: key "compile": the model cannot be compiled here: .*instruction'
    ):
        find_compiled(probe, 1000)
