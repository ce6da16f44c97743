"""A rank that takes longer than the others for its own part of a step is named."""

from __future__ import annotations

import re
import socket

import pytest

from harness.training.pace import SlowRanks
from tests.support.launch import Workshop

# Each step has two forward passes of at least 0.1 s on each rank, and on rank 1 they take longer from step 6 to 15.
PASSES = """
from tests.support.faults import *
import time
import harness.training.pace as pace

pace.LEAST_STEPS = 4
pace.SLOWER_BY = 0.5  # on a busy machine a rank may be a tenth slower by chance

def passing():
    time.sleep(0.1 + (0.3 if own_rank() and 6 <= Now.step < 16 else 0))

before(FORWARD, passing)
"""


@pytest.mark.slow
@pytest.mark.fault("a rank that is slower than the others", "named while training, once")
def test_a_slow_rank_is_named_once_and_not_the_one_that_waits(shop: Workshop) -> None:
    shop.add_run(
        min_train_tokens=2560,
        report_interval=2,
        validation_interval=None,
        validation_batches=None,
        start_val_token=None,
        checkpoint_interval=100,
    )
    said = shop.train(prelude=PASSES).stdout
    notes = [line for line in said.splitlines() if line.startswith("note: rank")]
    assert len(notes) == 1, said
    who = f"note: rank 1 ({socket.gethostname()}, pid "
    assert notes[0].startswith(who), "the machine, for somebody who has several"
    named = re.search(r"\) takes (\d+)% longer than the median, .* since global step (\d+); ", notes[0])
    assert named, notes
    assert 100 < int(named[1]) < 600, "four times as long, but for other work"
    assert int(named[2]) in (6, 8)


def test_named_again_only_after_it_was_as_fast_as_the_others() -> None:
    ranks, slow, fast = SlowRanks(), [0.1, 0.1, 0.114, 0.1], [0.1, 0.1, 0.109, 0.1]
    windows = [slow, slow, fast, slow, slow, slow, slow, fast, slow, slow, slow]
    names = "rank {}".format
    found = [(step, note) for step, seconds in enumerate(windows) for note in ranks.name(seconds, 10 * step, names)]
    said = "note: rank 2 takes 14% longer than the median, and has been slow since global step {}; the "
    said += "others wait for it; check_machine.py tests its device"
    assert found == [(5, said.format(30)), (10, said.format(80))]


def test_of_two_ranks_the_slower_one_is_named_and_tiny_steps_never() -> None:
    ranks = SlowRanks()
    assert [note[:16] for step in (0, 10, 20) for note in ranks.name([0.5, 0.1], step, str)] == ["note: 0 takes 40"]
    assert [note for step in range(0, 90, 10) for note in ranks.name([0.004, 0.001], step, str)] == []
