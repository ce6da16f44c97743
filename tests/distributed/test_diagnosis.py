"""`diagnose` finds the faulty rank from the heartbeats of all ranks: the rank that is behind the others and makes no
progress, never one that waits for another rank or is working."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from harness.common.processes import ProcessName
from harness.distributed.diagnosis import IDLE, Fault, Heartbeat, Heartbeats, LastHeartbeat, diagnose

TIMEOUTS = {"stuck": 10.0, "silent": 10.0, "gone": 5.0}
HERE = ProcessName.own()
ELSEWHERE = ProcessName("another", 1, "another boot")
FIRST = Heartbeat(1, ELSEWHERE, "global step 4", [4, 0], 3.0, stopping=False)


def at(order: int, part: int, stalled: float | None) -> Heartbeat:
    """Return the heartbeat of a rank on another machine that has done `part` parts of the place number `order` and has
    made no progress for `stalled` seconds (None if it is idle)."""
    return Heartbeat(1, ELSEWHERE, f"place {order}", [order, part], stalled, stopping=False)


def idle(order: int) -> Heartbeat:
    return at(order, IDLE, None)


def near(heartbeat: Heartbeat) -> Heartbeat:
    """Return the same heartbeat, but of a rank on this machine."""
    return replace(heartbeat, process=HERE)


def known_of(*heartbeats: Heartbeat) -> Heartbeats:
    return known(heartbeats)


def known(ranks: Sequence[Heartbeat | LastHeartbeat], *, contact: float = 0.0, frozen_until: float = 0.0) -> Heartbeats:
    """Return rank 0's record of the ranks' last heartbeats. A `Heartbeat` was received at 0 s, a `LastHeartbeat` at its
    own time."""
    last = [each if isinstance(each, LastHeartbeat) else LastHeartbeat(each, 0.0) for each in ranks]
    return Heartbeats(HERE, contact, last, frozen_until)


@pytest.mark.parametrize(
    ("ranks", "stuck"),
    [
        ([at(4, 1, 11), at(4, 0, 11)], [1]),  # rank 0 waits in an exchange that rank 1 has not reached
        ([at(4, 1, 11), at(2, 0, 11), at(4, 1, 11)], [1]),
        ([at(4, 1, 11), at(4, 0, 11), at(4, 0, 11)], [1, 2]),
        ([at(4, 1, 11), at(4, 0, 9)], None),  # rank 1 is slow, but within its timeout
        ([at(4, 1, 11), idle(2)], None),  # rank 1 is between two places, where work may take long
        ([idle(4), at(4, 0, 11)], [1]),  # rank 0 waits for rank 1 in a report
        ([at(5, 7, 11), idle(5)], [0]),  # rank 0 validates alone and makes no progress
        ([at(5, 7, 3), idle(5)], None),
        ([idle(5), at(5, 2, 11), idle(5)], [1]),  # all ranks validate, and ranks 0 and 2 have finished
        ([idle(-1), idle(-1)], None),  # a download before the first step
    ],
)
def test_who_is_stuck(ranks: list[Heartbeat], stuck: list[int] | None) -> None:
    found = diagnose(known(ranks), 0.0, **TIMEOUTS)
    assert (found and found.ranks) == stuck
    if found and stuck:
        assert f"rank {stuck[0]} (another, pid 1)" in found.text
        assert "stuck for 11 s in place" in found.text


NO_ANSWER = "a device or the network does not answer"
SILENT = "frozen, gone, or its machine is cut off"
FROZEN = LastHeartbeat(at(4, 1, 1), 2.0)  # in the same exchange as rank 0
# Name of the case -> heartbeats, time, and the fault found at that time.
CASES: dict[str, tuple[Heartbeats, float, Fault | None]] = {
    # Rank 1 has waited for rank 0, which is within its timeout.
    "all in one exchange within their time": (known([at(4, 1, 9), at(4, 1, 12)]), 0.0, None),
    "all in one exchange is nobody's fault": (
        known([at(4, 1, 11), at(4, 1, 12)]),
        0.0,
        Fault(f"no rank got beyond place 4 for 11 s: {NO_ANSWER}", []),
    ),
    "silent for a while": (known([LastHeartbeat(idle(4), 9.0), idle(4)], contact=9.0), 9.0, None),
    "silent for too long": (
        known([LastHeartbeat(idle(4), 11.0), idle(4)], contact=11.0),
        11.0,
        Fault(f"rank 1 (another, pid 1) gave no sign for 11 s: {SILENT}", [1]),
    ),
    "two silent for too long": (
        known([LastHeartbeat(idle(4), 13.0), idle(4), LastHeartbeat(idle(4), 2.0)], contact=13.0),
        13.0,
        Fault(f"rank 1 (another, pid 1) and rank 2 (another, pid 1) gave no sign for 13 s: {SILENT}", [1, 2]),
    ),
    "silent, when no peer is known to be lost": (known([LastHeartbeat(idle(4), 6.0), idle(4)], contact=6.0), 6.0, None),
    "not judged by what it said long ago": (
        known([LastHeartbeat(at(4, 1, 11), 11.0), FROZEN], contact=11.0),
        11.0,
        None,
    ),
    "found silent soon after": (
        known([LastHeartbeat(at(4, 1, 11), 12.5), FROZEN], contact=12.5),
        12.5,
        Fault(f"rank 1 (another, pid 1) gave no sign for 10 s: {SILENT}", [1]),
    ),
    "no contact to anybody": (
        known([idle(4), idle(4)]),
        11.0,
        Fault("no connection to rank 0's machine (another) for 11 s", [0]),
    ),
    "no contact to the neighbour that has the store": (
        known([near(idle(4)), near(idle(4))]),
        11.0,
        Fault(f"rank 0 ({HERE}), or its torchrun, gave no answer for 11 s: frozen", [0]),
    ),
    # Ranks whose last heartbeats are little older than the last contact with the store are not called silent.
    "without contact nobody else is to blame": (known([idle(4), idle(4)], contact=0.5), 10.2, None),
    "no contact to rank 0, which is gone": (known([LastHeartbeat(idle(4), 0.0, 8.0), idle(4)]), 11.0, None),
    "ended a moment ago": (known([idle(4), LastHeartbeat(near(idle(4)), 0.0, 1.0)]), 1.0, None),
    "ended some seconds ago": (
        known([idle(4), LastHeartbeat(near(idle(4)), 0.0, 1.0)]),
        6.0,
        Fault(f"rank 1 ({HERE}) ended suddenly", [1]),
    ),
    "ended, before it could be called silent": (
        known([LastHeartbeat(idle(4), 11.0), LastHeartbeat(near(idle(4)), 0.0, 9.0)], contact=11.0),
        11.0,
        None,
    ),
    "stuck by heartbeats from before this one's freeze": (
        known([at(4, 1, 11), at(4, 0, 11)], frozen_until=5.0),
        4.0,
        None,
    ),
    "stuck by heartbeats from after this one's freeze": (
        known([at(4, 1, 11), at(4, 0, 11)], frozen_until=5.0),
        5.0,
        Fault("rank 1 (another, pid 1) stuck for 11 s in place 4", [1]),
    ),
}


@pytest.mark.parametrize(("known", "now", "fault"), CASES.values(), ids=CASES)
def test_the_fault_found_in_each_case(known: Heartbeats, now: float, fault: Fault | None) -> None:
    assert diagnose(known, now, **TIMEOUTS) == fault


def test_silence_counts_sooner_when_a_peer_is_known_to_be_lost() -> None:
    heartbeats = known([LastHeartbeat(idle(4), 6.0), idle(4)], contact=6.0)
    fault = Fault(f"rank 1 (another, pid 1) gave no sign for 6 s: {SILENT}", [1])
    assert diagnose(heartbeats, 6.0, **TIMEOUTS | {"silent": 5.0}) == fault


def test_a_heartbeat_is_read_as_it_was_written() -> None:
    for heartbeat in (FIRST, replace(FIRST, stalled=None, stopping=True, leaving=True, process=HERE)):
        assert Heartbeat.decode(heartbeat.encode().encode()) == heartbeat


def test_only_a_new_heartbeat_counts() -> None:
    heartbeats = known_of(FIRST, FIRST)
    second = replace(FIRST, number=2)
    heartbeats.receive([second, FIRST], 7.0)
    assert heartbeats.last == [LastHeartbeat(second, 7.0), LastHeartbeat(FIRST, 0.0)]
    assert heartbeats.contact == 7.0, "an answer of the store counts even without new heartbeats"


def test_a_heartbeat_from_before_the_others_went_on_blames_nobody() -> None:
    """Rank 1 waits while rank 0 saves for a long time. Then both continue. Rank 1 is not called stuck while its newest
    heartbeat is from before that."""
    timeouts = {"stuck": 10.0, "silent": 20.0, "gone": 5.0}
    saving = replace(FIRST, place="global step 3", progress=[3, IDLE], stalled=None)
    heartbeats = known_of(saving, replace(FIRST, stalled=12.0))
    assert diagnose(heartbeats, 0.0, **timeouts) is None

    def receive(second: int, other: Heartbeat) -> bool:
        """Record progress of rank 0 and the heartbeat `other` of rank 1. Return True if rank 1 is then called stuck."""
        heartbeats.receive([replace(FIRST, number=second + 1, progress=[6, second], stalled=0.0), other], second)
        fault = diagnose(heartbeats, second, **timeouts)
        assert fault is None or fault.ranks == [1]
        return fault is not None

    assert not receive(1, heartbeats.last[1].heartbeat)
    assert not receive(2, heartbeats.last[1].heartbeat)
    assert not receive(3, replace(FIRST, number=2, stalled=13.0)), "it may have been written before rank 1 continued"
    assert receive(4, replace(FIRST, number=3, stalled=14.0)), "rank 1 has not continued"


def test_a_fault_counts_as_reported_if_a_leaving_rank_is_on_this_machine() -> None:
    leaving = replace(FIRST, leaving=True)
    assert not known_of(FIRST, FIRST).is_fault_told()
    assert not known_of(FIRST, leaving).is_fault_told()
    assert known_of(FIRST, replace(leaving, process=HERE)).is_fault_told()


def test_neighbours_are_the_ranks_of_this_machine() -> None:
    heartbeats = known_of(FIRST, replace(FIRST, process=HERE), replace(FIRST, process=replace(HERE, pid=1)))
    assert heartbeats.neighbours() == [1, 2]


def test_nobodys_silence_counts_after_a_freeze() -> None:
    heartbeats = known_of(FIRST, FIRST)
    heartbeats.forgive_freeze(20.0, grace_seconds=5.0)
    assert (heartbeats.contact, heartbeats.frozen_until) == (20.0, 25.0)
    assert [last.at for last in heartbeats.last] == [20.0, 20.0]


def test_a_process_of_this_machine_that_ended() -> None:
    """An ended process of this machine is found by its pid, before the timeout for silence, even while its parent has
    not read its exit status."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    name = replace(HERE, pid=child.pid)
    while not name.is_gone():
        time.sleep(0.01)
    assert child.returncode is None
    idle = replace(FIRST, stalled=None)
    heartbeats = known_of(idle, replace(idle, process=name), replace(idle, process=HERE))
    heartbeats.find_gone(1.0)
    assert [last.gone_since for last in heartbeats.last] == [None, 1.0, None], "only this machine's pids are checked"
    assert diagnose(heartbeats, 1.0, **TIMEOUTS) is None
    heartbeats.find_gone(6.0)
    found = diagnose(heartbeats, 6.0, **TIMEOUTS)
    assert found is not None
    assert found.ranks == [1]
    assert "ended suddenly" in found.text
    child.wait()
    assert name.is_gone()
    assert not replace(name, pid=os.getpid()).is_gone()
