"""One rank that differs from the others.

The faults are gradients that are not finite, a slow rank 0, and weights that drift apart.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from harness.comparison.records import RunRecord
from harness.runs.checkpoints import list_checkpoints
from harness.runs.directory import RunDirectory
from tests.support.fake_hub import CORPUS, FakeHub, corpus
from tests.support.launch import Workshop, metrics
from tests.support.same_end import assert_same_end
from tests.support.straight import FAULTS, SETTINGS, STEPS


@pytest.fixture(scope="module")
def shop(straight_shop: Workshop) -> Workshop:
    return straight_shop


# Gradients that are not finite


@dataclass(frozen=True)
class Infection:
    """Change of one rank's gradient at some steps."""

    value: str
    rank: int
    ranks: int
    precision: str

    def prelude(self, steps: Sequence[int]) -> str:
        change = f"lambda gradient: gradient + torch.{self.value}"
        return FAULTS + f"in_gradients({change}, rank={self.rank}, steps={steps!r})\n"


EVERY_INFECTION = [
    Infection(value, rank, ranks, precision)
    for value, (rank, ranks), precision in itertools.product(
        ("nan", "inf"), ((0, 2), (1, 2), (2, 3)), ("fp32", "fp16", "bf16")
    )
]
FEW_INFECTIONS = [Infection("inf", 1, 2, "fp32"), Infection("nan", 0, 2, "fp16"), Infection("nan", 2, 3, "bf16")]


@pytest.mark.slow
@pytest.mark.fault("a gradient that is not finite", "all ranks skip that step alone, and the metrics count it")
def test_some_infected_gradients(shop: Workshop, tmp_path: Path, exhaustive: bool) -> None:
    """Steps with a gradient that is not finite are skipped. The run reaches its end if fewer than `max_skipped_steps`
    steps in a row are skipped."""
    infected = (5, 8, 9)
    for number, infection in enumerate(EVERY_INFECTION if exhaustive else FEW_INFECTIONS):
        settings = SETTINGS | {"min_train_tokens": STEPS * 64 * infection.ranks, "max_skipped_steps": 3}
        run = shop.add_run(f"infected-{number}", **settings, checkpoint_interval=1, precision=infection.precision)
        notes = tmp_path / str(number)
        notes.mkdir()
        prelude = infection.prelude(infected) + f"record_skips({str(notes)!r})"
        shop.train(run.name, ranks=infection.ranks, prelude=prelude)
        decisions = [json.loads(path.read_text()) for path in notes.iterdir()]
        assert decisions == [[step in infected for step in range(STEPS)]] * infection.ranks, infection
        lines = [line for line in metrics(run) if line["event"] == "train"]
        assert [line["skipped_steps"] for line in lines] == [int(step in infected) for step in range(STEPS)]
        assert all(bool(line["gradient_norm"]) == (line["global_step"] not in infected) for line in lines)
        assert json.loads((run / "summary.json").read_text())["skipped_steps"] == len(infected)
        saved = dict(list_checkpoints(run / "checkpoints"))
        weights = [(saved[step] / "model.safetensors").read_bytes() for step in (4, 5, 6)]
        assert weights[0] == weights[1] != weights[2]


@pytest.mark.fault("gradients that are never finite again", "ends after max_skipped_steps; best has finite weights")
def test_infected_for_good(shop: Workshop, exhaustive: bool) -> None:
    """A run ends within one report interval after `max_skipped_steps` steps in a row have been skipped."""
    for allowed, interval in itertools.product((1, 3, 4), (1, 4)) if exhaustive else [(3, 1), (3, 4)]:
        settings = SETTINGS | {"report_interval": interval, "max_skipped_steps": allowed, "checkpoint_interval": 2}
        run = shop.add_run(f"ill-{allowed}-{interval}", **settings)
        result = shop.train(run.name, prelude=Infection("nan", 1, 2, "fp32").prelude(range(5, 99)), expect=4)
        (line,) = [each for each in result.stderr.splitlines() if each.startswith("stopped by max_skipped_steps")]
        assert "not finite" in line
        assert RunRecord.read(RunDirectory(run)).state.word == "diverged"
        last = metrics(run)[-1]["global_step"]
        assert 5 + allowed - 1 <= last <= 5 + allowed - 1 + interval
        assert sum(event.get("skipped_steps", 0) for event in metrics(run)) == last - 4
        meta = json.loads((run / "checkpoints" / "best" / "meta.json").read_text())
        assert isinstance(meta["best_loss"], float)
        assert meta["best_step"] == meta["global_step"]
        weights = load_file(run / "checkpoints" / "best" / "model.safetensors")
        assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.slow
def test_skipped_steps_at_the_end_and_before_a_change(shop: Workshop) -> None:
    """A run whose last steps are skipped is validated and finished. One that was ended by skipped steps continues."""
    infection, settings = Infection("nan", 1, 2, "fp32"), SETTINGS | {"max_skipped_steps": 3}
    late, early = shop.add_run("late", **settings), shop.add_run("early", **settings)
    shop.train(late.name, prelude=infection.prelude(range(STEPS - 3, STEPS)))
    assert json.loads((late / "summary.json").read_text())["has_diverged"]
    assert [each["global_step"] for each in metrics(late) if each["event"] == "validation"][-1] == STEPS - 1
    shop.train(early.name, prelude=infection.prelude(range(3, 6)), expect=4)
    shop.train(early.name)
    assert not json.loads((early / "summary.json").read_text())["has_diverged"]
    signal_in_validation = "before(EVALUATION, tell(15), rank=0, step={})\n"
    told = shop.add_run("told", **settings | {"report_interval": 1, "validation_interval": 8})
    shop.train(told.name, prelude=infection.prelude(range(6, 9)) + signal_in_validation.format(8), expect=143)
    shop.train(told.name)
    assert not json.loads((told / "summary.json").read_text())["has_diverged"]
    last = shop.add_run("last", **settings | {"report_interval": 1, "validation_interval": 8})
    ill = infection.prelude(range(STEPS - 3, STEPS)) + signal_in_validation.format(STEPS - 1)
    shop.train(last.name, prelude=ill, expect=143)
    assert RunRecord.read(RunDirectory(last)).state.word == "stopped", "the next process finishes it"
    shop.train(last.name)
    assert json.loads((last / "summary.json").read_text())["has_diverged"]
    # The training loss is not finite in those steps either, so that it is far above its lowest value.
    steps = {"min_train_tokens": 64 * 2 * 44, "report_interval": 1, "validation_interval": 28, "max_skipped_steps": 10}
    losses = "around(FORWARD, lambda original, *a: original(*a) * (torch.nan if 18 < Now.step < 29 else 1))\n"
    for name, end in (("lost", 44), ("extended", 29)):
        lost = shop.add_run(name, **SETTINGS | steps | {"min_train_tokens": 64 * 2 * end})
        shop.train(lost.name, prelude=FAULTS + losses + signal_in_validation.format(28), expect=143)
        shop.add_run(name, **SETTINGS | steps)
        shop.train(lost.name)
        assert not json.loads((lost / "summary.json").read_text())["has_diverged"], name


@pytest.mark.slow
@pytest.mark.fault("a loss that is not finite", "null in the metrics; best does not move")
def test_infected_losses(shop: Workshop, exhaustive: bool) -> None:
    """If a training or validation loss is NaN at some steps, it is null in the metrics and does not change which
    checkpoint is best."""
    infected = "around(FORWARD, lambda original, *a: original(*a) * (torch.nan if Now.step in {steps} else 1))\n"
    rank1 = "if own_rank() == 1: " + infected
    training = {"validation_interval": None, "validation_batches": None, "start_val_token": None}
    cases = {
        "training": (SETTINGS | training | {"checkpoint_interval": 3}, rank1.format(steps={7, 8})),
        "validation": (SETTINGS, "if own_rank() == 0: " + infected.format(steps={9})),
        "shared-validation": (SETTINGS | {"validation_ranks": "all"}, rank1.format(steps={9})),
    }
    for name in cases if exhaustive else ("training", "validation"):
        settings, prelude = cases[name]
        run = shop.add_run(f"loss-{name}", **settings)
        shop.train(run.name, prelude=FAULTS + prelude)
        event = "train" if name == "training" else "validation"
        losses = {line["global_step"]: line["loss"] for line in metrics(run) if line["event"] == event}
        assert {step for step, loss in losses.items() if loss is None} == ({7, 8} if name == "training" else {9})
        saved = dict(list_checkpoints(run / "checkpoints"))
        best = json.loads((run / "checkpoints" / "best" / "meta.json").read_text())
        if name == "training":
            assert best["best_step"] == best["global_step"] == STEPS - 1
            continue
        assert not json.loads((saved[9] / "meta.json").read_text())["is_best"]
        assert isinstance(best["best_loss"], float)
        assert best["best_step"] == best["global_step"] != 9


# Rank 0 is slow


@pytest.mark.slow
@pytest.mark.fault(
    "rank 0 takes longer than the time-out", "in a download, validation, save or chart: the others wait; the same end"
)
def test_slow_rank0(shop: Workshop, tmp_path: Path) -> None:
    """The other ranks wait if rank 0's own work takes longer than a gradient exchange may take. Rank 0 alone downloads,
    and a complete dataset is not asked for again."""
    timeout, seconds = {"COLLECTIVE_TIMEOUT_SECONDS": "3"}, 5
    patient = Workshop(shop.path, timeout, draws=True)
    works = (
        "def slowly(original, self, indexes):\n"
        "    for index in original(self, indexes):\n"
        f"        time.sleep({seconds / 3} * (Now.step == 3)); yield index\n"
        "around('harness.distributed.signals:SharedWork.until_stopped', slowly)\n"
        f"before(WRITE, pause({seconds}), step=3)\n"
        f"before(METRICS, pause({seconds}), step=5)\n"
        f"slow_charts({seconds})\n"
    )
    run = patient.add_run("slow", **SETTINGS)

    def train_after_a_slow_download() -> None:
        with FakeHub() as hub:
            dataset = hub.add_dataset(CORPUS, corpus())
            dataset.files["train.safetensors"].delay_seconds = seconds
            own = Workshop(tmp_path, hub.environment(tmp_path / "hf") | timeout)
            run = own.add_run(dataset=CORPUS, min_train_tokens=256)
            own.train(prelude=FAULTS)
            assert [event["event"] for event in metrics(run)].count("validation") == 2
            assert len(hub.seen("GET", "train.safetensors")) <= 2  # the Hub's own address and the storage it points to
            asked = len(hub.requests)
            own.train("r", "--restart", ranks=1)
            assert len(hub.requests) == asked, "the dataset is complete"

    with ThreadPoolExecutor(1) as pool:
        download = pool.submit(train_after_a_slow_download)
        began = time.monotonic()
        patient.train(run.name, prelude=FAULTS + "import time\n" + works)
        assert time.monotonic() - began > 4 * seconds
        assert_same_end(patient.runs / "straight", run)
        download.result()


# Weights that drift apart


@pytest.mark.fault(
    "weights of one rank change",
    "found before the next save, with the tensor named and, of three ranks, the one that differs",
)
def test_divergence(shop: Workshop, exhaustive: bool) -> None:
    cases = [(0, 2, None), (1, 2, None), (0, 3, None), (2, 3, None), (1, 2, 2), (2, 3, 2), (0, 3, 1)]
    for rank, ranks, interval in cases if exhaustive else cases[1::4]:
        tokens = {"min_train_tokens": STEPS * 64 * ranks, "weights_check_interval": interval}
        run = shop.add_run(f"drift-{rank}-{ranks}-{interval}", **SETTINGS | tokens)
        # The weights change before step 7. The ranks compare them after step 7 with an interval of 1, after step 8 with
        # an interval of 2, and after step 9, before a save, without an interval.
        found = 9 if interval is None else 7 if interval == 1 else 8
        result = shop.train(run.name, ranks=ranks, prelude=FAULTS + f"drift_before(7, {rank})", expect=1)
        (line,) = result.error_lines
        assert f"after global step {found}" in line
        assert "tok_emb.weight" in line
        who = f"rank {rank} differ from those of the other 2 ranks" if ranks == 3 else "rank 0 and rank 1 differ"
        assert who in line
        assert list_checkpoints(run / "checkpoints")[-1][0] == 6  # nothing with those weights was saved
        if ranks == 2:
            shop.train(run.name, prelude=FAULTS)
            assert_same_end(shop.runs / "straight", run)
