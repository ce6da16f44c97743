"""Saving in the background.

With "async_checkpoint": true, training pauses only for a copy. The files must hold the values of that moment, and
`latest` must never point to a checkpoint that could be lost.
"""

from __future__ import annotations

import itertools
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from harness.runs.checkpoints import list_checkpoints, verify_checkpoint
from tests.support.jobs import assert_named_are_whole, ends_of, said
from tests.support.launch import Workshop, finish, wait_until
from tests.support.same_end import assert_same_end
from tests.support.straight import FAULTS, SETTINGS, STEPS

pytestmark = pytest.mark.slow


SLOW_SECONDS = 2


@pytest.fixture(scope="module")
def shop(straight_shop: Workshop) -> Workshop:
    return straight_shop


def add_run(shop: Workshop, name: str, **changes: Any) -> Path:
    return shop.add_run(name, **SETTINGS | changes, async_checkpoint=True)


def latest_step(run: Path) -> int | None:
    """Return the step that `latest` points to, or None without `latest`. Fails if that checkpoint is not whole."""
    link = run / "checkpoints" / "latest"
    if not link.is_symlink():
        return None
    verify_checkpoint(link.resolve())
    return int(link.resolve().name.rpartition("-")[2])


@pytest.mark.fault(
    "a slow disk", "training continues during the save; latest points to the checkpoint once that is durable"
)
def test_steps_go_on_while_a_disk_is_slow(shop: Workshop, tmp_path: Path) -> None:
    """While the first checkpoint takes seconds to reach the disk, steps are trained, and `latest` does not exist."""
    run, mark = add_run(shop, "slow-disk", min_train_tokens=64 * 100, validation_interval=99), tmp_path / "mark"
    # The steps are slow enough that not all of them fit into these seconds.
    flush = "harness.runs.checkpoints:rename_whole"
    slow = f"before({flush!r}, note({str(mark)!r}, pause({SLOW_SECONDS})), call=1)\nbefore(STEP, pause(0.02))\n"
    processes = shop.start("slow-disk", ranks=1, prelude=FAULTS + slow)
    steps: set[int] = set()
    wait_until(lambda: mark.exists() and mark.read_text(), *processes)
    while time.time() - float(mark.read_text()) < SLOW_SECONDS - 0.2:
        assert latest_step(run) is None  # no link before the files are durable
        text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
        steps |= {json.loads(line)["global_step"] for line in text.splitlines(keepends=True) if line.endswith("\n")}
        time.sleep(0.05)
    finish(processes, expect=0, timeout=60)
    assert len(steps) > 10
    assert latest_step(run) == 99
    assert [step for step, _ in list_checkpoints(run / "checkpoints")] == [0, 99]


@pytest.mark.fault(
    "training changes weights while a save writes them", "all files but meta.json are those of a synchronous save"
)
def test_the_bytes_are_those_of_a_synchronous_save(shop: Workshop, exhaustive: bool) -> None:
    """A background save writes the weights as they were when the save began. Training changes the weights before they
    are written, because the test delays the writer."""
    for ranks, precision in itertools.product((1, 2, 3), ("fp32", "fp16")) if exhaustive else [(2, "fp16")]:
        settings = {"precision": precision, "min_train_tokens": STEPS * 64 * ranks, "checkpoint_interval": 2}
        name = f"{ranks}-{precision}"
        runs = [shop.add_run(f"sync-{name}", **SETTINGS | settings), add_run(shop, f"async-{name}", **settings)]
        held_up = "before(WRITE, pause(0.1))\nbefore(SYNC, pause(0.02))\n"
        for run in runs:
            shop.train(run.name, ranks=ranks, prelude=FAULTS + "lively_scaler()\n" + held_up)
        assert_same_end(*runs)
        saved = [list_checkpoints(run / "checkpoints") for run in runs]
        assert [step for step, _ in saved[0]] == [step for step, _ in saved[1]] == [0, 2, 4, 6, 8, 10, 11]
        for (_, one), (_, other) in zip(*saved, strict=True):
            assert_same_checkpoint(one, other)


def assert_same_checkpoint(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    metas = []
    for path in (one, other):
        meta = json.loads((path / "meta.json").read_text())
        del meta["seconds"], meta["sha256"]["meta.json"], meta["train"]["async_checkpoint"]
        del meta["metrics_bytes"]  # metrics hold times, whose number of digits varies
        metas.append(meta)
    assert metas[0] == metas[1]
    for name in names:
        assert name == "meta.json" or (one / name).read_bytes() == (other / name).read_bytes(), (one, name)


# Moments of the third save: its beginning, each flush (four files, the draft, the folder, and the folder again after
# each link), and the writing of each link.
MOMENTS = ["WRITE, {action}, call=3"]
MOMENTS += [f"SYNC, {{action}}, call={call}" for call in range(13, 19)]
MOMENTS += [f"'harness.runs.checkpoints:sync', {{action}}, call={call}" for call in (5, 6)]
MOMENTS += [f"'harness.runs.checkpoints:point', {{action}}, call={call}" for call in (5, 6)]


@pytest.mark.fault(
    "told to stop during a save", "the save is completed; latest has the last step; resumed to the same end"
)
@pytest.mark.fault(
    "a background save fails", "ends with its step named; older checkpoints are whole; resumed to the same end"
)
def test_a_save_that_is_disturbed(shop: Workshop, straight: Path, exhaustive: bool) -> None:
    """If a signal to stop arrives during a save, the run completes the save before it ends. An error in the writer's
    thread ends the run later: at the next step, the next save or the end of the run."""
    moments = MOMENTS if exhaustive else [MOMENTS[4], MOMENTS[-1]]
    told, last = "in_turn(tell(SIGTERM), pause(0.2))", "WRITE, {action}, call=5"  # the last save
    # The injected action, its moment, and the steps that `latest` may point to afterwards
    cases = [(action, moment, [3, 6]) for action in (told, "fill_disk") for moment in moments]
    # The second of these comes after all steps are done.
    cases += [(action, last, [9]) for action in ("fill_disk", "in_turn(pause(0.5), fill_disk)")]
    for number, (action, moment, latest) in enumerate(cases):
        run = add_run(shop, f"disturbed-{number}")
        prelude = FAULTS + f"before({moment.format(action=action)}, rank=0)"
        result = shop.train(run.name, prelude=prelude, expect=128 + signal.SIGTERM if action == told else 1)
        (line,) = result.error_lines
        if action == told:
            assert line.startswith(f"stopped by SIGTERM after global step {latest_step(run)};")
            assert 6 in [step for step, _ in list_checkpoints(run / "checkpoints")]
        else:
            assert "cannot write the checkpoint of step" in line
            assert "No space left on device" in line
            assert "to continue" in line
            assert "Traceback" not in result.stderr
            assert latest_step(run) in latest
            assert_named_are_whole(run)
            # Without its last checkpoint a run is not complete, so it has no summary.
            assert not (run / "summary.json").exists()
        shop.train(run.name, prelude=FAULTS)
        assert_same_end(straight, run)


def test_a_rank_that_is_told_to_end_as_it_leaves_does_not_speak_for_the_one_that_failed(shop: Workshop) -> None:
    """If torchrun's SIGTERM reaches rank 1 just after rank 1 has learned of rank 0's error, rank 1 ends at once and
    leaves the message to rank 0. It does not wait for another signal."""
    run = add_run(shop, "leaving")
    faults = """
import os
from harness.common.errors import PeerError
if os.environ["RANK"] == "1":
    PeerError.__init__ = lambda self, *arguments: tell(SIGTERM)()
before(WRITE, fill_disk, rank=0, call=2)
"""
    processes = shop.start(run.name, prelude=FAULTS + faults)
    result = ends_of(processes, timeout=60)
    assert result.status == 1
    assert processes[1].returncode == 128 + signal.SIGTERM
    told = [line for _, stderr in said(processes) for line in stderr.splitlines() if line.startswith("error:")]
    assert len(told) == 1, told
    assert "cannot write the checkpoint of step" in told[0]


LARGE = {"vocab_size": 8192, "emb_dim": 512, "n_layers": 4, "n_heads": 8}  # 21 million parameters: 250 MB a save


@pytest.mark.fault("a checkpoint of 250 MB", "a background save pauses training for less time than a synchronous one")
def test_how_long_the_loop_pauses(shop: Workshop, tmp_path: Path, exhaustive: bool) -> None:
    steps = 24 if exhaustive else 6
    pauses: dict[bool, list[float]] = {False: [], True: []}
    settings: dict[str, Any] = dict.fromkeys(("validation_interval", "validation_batches", "start_val_token"))
    settings |= {"microbatch_size": 1, "gradient_accumulation_steps": 1, "min_train_tokens": 16 * steps}
    settings |= {"checkpoint_interval": steps // 2, "keep_checkpoints": 1}  # at the beginning, the middle and the end
    # Only the shortest pauses are compared, because the machine's other work makes pauses longer. If it has much other
    # work, there are more attempts.
    for attempt in range(3):
        for in_background, seconds in pauses.items():
            notes = tmp_path / f"{attempt}-{in_background}"
            run = shop.add_run(
                f"large-{notes.name}", model=LARGE, **SETTINGS | settings, async_checkpoint=in_background
            )
            timed = f"record_seconds('checkpointing:Checkpointer.save', {str(notes)!r}, rank=0)\n"
            # The steps are slow enough that a save is written before the next one begins.
            shop.train(run.name, ranks=1, prelude=FAULTS + timed + "before(STEP, pause(0.5))")
            seconds += [float(line) for line in notes.read_text().splitlines()][
                :-1
            ]  # nothing is trained after the last
        if min(pauses[True]) < 0.6 * min(pauses[False]):
            break
    assert min(pauses[True]) < 0.6 * min(pauses[False]), pauses
