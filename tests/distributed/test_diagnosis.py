"""`diagnose` finds the faulty rank from the heartbeats of all ranks: the rank that is behind the others and makes no
progress, never one that waits for another rank or is working."""

from __future__ import annotations

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
    """Return the heartbeat of a rank on another machine. The rank is at place number `order`, has done `part` parts of
    its work there, and has made no progress for `stalled` seconds (None if it is idle)."""
    return Heartbeat(1, ELSEWHERE, f"place {order}", [order, part], stalled, stopping=False)


def idle(order: int) -> Heartbeat:
    return at(order, IDLE, None)


def near(heartbeat: Heartbeat) -> Heartbeat:
    """Return the same heartbeat, but of a rank on this machine."""
    return replace(heartbeat, process=HERE)


def known(ranks: Sequence[Heartbeat | LastHeartbeat], *, contact: float = 0.0, frozen_until: float = 0.0) -> Heartbeats:
    """Return rank 0's record of the ranks' last heartbeats. A `Heartbeat` counts as received at 0 s, and a
    `LastHeartbeat` has its own time."""
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
        assert "made no progress for 11 s in place" in found.text


def last(at: float, heartbeat: Heartbeat | None = None, gone_since: float | None = None) -> LastHeartbeat:
    """Return a heartbeat, by default of an idle rank, that was received at `at` seconds."""
    return LastHeartbeat(heartbeat or idle(4), at, gone_since)


def case(
    ranks: Sequence[Heartbeat | LastHeartbeat], until: tuple[float, float], now: float, fault: Fault | None = None
) -> tuple[Heartbeats, float, Fault | None]:
    """Return rank 0's record of the ranks, the time `now`, and the fault to be found at that time. `until` has two
    times in seconds, both kept in the record: the last contact with the store, and the end of this process's own
    freeze."""
    return known(ranks, contact=until[0], frozen_until=until[1]), now, fault


SILENT = "frozen, gone, or on a machine that is cut off"
ONE, TWO = at(4, 1, 11), at(4, 0, 11)  # rank 0 waits in an exchange that rank 1 has not reached
HOME = near(idle(4))
CASES: dict[str, tuple[Heartbeats, float, Fault | None]] = {
    # Rank 1 has waited for rank 0, which is within its timeout.
    "all in one exchange within their time": case([at(4, 1, 9), at(4, 1, 12)], (0, 0), 0),
    "all in one exchange is nobody's fault": case(
        [ONE, at(4, 1, 12)],
        (0, 0),
        0,
        Fault("no rank got beyond place 4 for 11 s: a device or the network does not answer", []),
    ),
    "silent for a while": case([last(9), idle(4)], (9, 0), 9),
    "silent for too long": case(
        [last(11), idle(4)], (11, 0), 11, Fault(f"rank 1 (another, pid 1) gave no sign for 11 s: {SILENT}", [1])
    ),
    "two silent for too long": case(
        [last(13), idle(4), last(2)],
        (13, 0),
        13,
        Fault(f"rank 1 (another, pid 1) and rank 2 (another, pid 1) gave no sign for 13 s: {SILENT}", [1, 2]),
    ),
    "silent, when no peer is known to be lost": case([last(6), idle(4)], (6, 0), 6),
    "not judged by what it said long ago": case([last(11, ONE), last(2, at(4, 1, 1))], (11, 0), 11),
    "found silent soon after": case(
        [last(12.5, ONE), last(2, at(4, 1, 1))],
        (12.5, 0),
        12.5,
        Fault(f"rank 1 (another, pid 1) gave no sign for 10 s: {SILENT}", [1]),
    ),
    "no contact to anybody": case(
        [idle(4), idle(4)], (0, 0), 11, Fault("no answer from rank 0's machine (another) for 11 s", [0])
    ),
    "no contact to the neighbor that has the store": case(
        [HOME, HOME], (0, 0), 11, Fault(f"rank 0 ({HERE}), or its torchrun, gave no answer for 11 s: frozen", [0])
    ),
    # Ranks whose last heartbeats are little older than the last contact with the store are not called silent.
    "without contact nobody else is to blame": case([idle(4), idle(4)], (0.5, 0), 10.2),
    "no contact to rank 0, which is gone": case([last(0, gone_since=8), idle(4)], (0, 0), 11),
    "ended a moment ago": case([idle(4), last(0, HOME, 1)], (0, 0), 1),
    "ended some seconds ago": case(
        [idle(4), last(0, HOME, 1)], (0, 0), 6, Fault(f"rank 1 ({HERE}) ended suddenly", [1])
    ),
    "ended, before it could be called silent": case([last(11), last(0, HOME, 9)], (11, 0), 11),
    "stuck by heartbeats from before this one's freeze": case([ONE, TWO], (0, 5), 4),
    "stuck by heartbeats from after this one's freeze": case(
        [ONE, TWO], (0, 5), 5, Fault("rank 1 (another, pid 1) made no progress for 11 s in place 4", [1])
    ),
}


@pytest.mark.parametrize(("known", "now", "fault"), CASES.values(), ids=CASES)
def test_the_fault_found_in_each_case(known: Heartbeats, now: float, fault: Fault | None) -> None:
    assert diagnose(known, now, **TIMEOUTS) == fault


def test_silence_counts_sooner_when_a_peer_is_known_to_be_lost() -> None:
    heartbeats = known([last(6), idle(4)], contact=6.0)
    fault = Fault(f"rank 1 (another, pid 1) gave no sign for 6 s: {SILENT}", [1])
    assert diagnose(heartbeats, 6.0, **TIMEOUTS | {"silent": 5.0}) == fault


def test_only_a_new_heartbeat_counts() -> None:
    heartbeats = known([FIRST, FIRST])
    second = replace(FIRST, number=2)
    heartbeats.receive([second, FIRST], 7.0)
    assert heartbeats.last == [LastHeartbeat(second, 7.0), LastHeartbeat(FIRST, 0.0)]
    assert heartbeats.contact == 7.0, "an answer of the store counts even without new heartbeats"


def test_a_heartbeat_from_before_the_others_went_on_blames_nobody() -> None:
    """Rank 1 waits while rank 0 saves for a long time. Then both continue. Rank 1 is not called stuck while its newest
    heartbeat may have been sent before they continued."""
    timeouts = {"stuck": 10.0, "silent": 20.0, "gone": 5.0}
    saving = replace(FIRST, place="global step 3", progress=[3, IDLE], stalled=None)
    heartbeats = known([saving, replace(FIRST, stalled=12.0)])
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
    assert not known([FIRST, FIRST]).is_fault_told()
    assert not known([FIRST, leaving]).is_fault_told()
    assert known([FIRST, replace(leaving, process=HERE)]).is_fault_told()


def test_neighbors_are_the_ranks_of_this_machine() -> None:
    heartbeats = known([FIRST, replace(FIRST, process=HERE), replace(FIRST, process=replace(HERE, pid=1))])
    assert heartbeats.neighbors() == [1, 2]


def test_nobodys_silence_counts_after_a_freeze() -> None:
    heartbeats = known([FIRST, FIRST])
    heartbeats.forgive_freeze(20.0, grace_seconds=5.0)
    assert (heartbeats.contact, heartbeats.frozen_until) == (20.0, 25.0)
    assert [last.at for last in heartbeats.last] == [20.0, 20.0]


def test_a_process_of_this_machine_that_ended() -> None:
    """An ended process of this machine is found by its pid, before the timeout for silence."""
    ended = replace(HERE, pid=2**22 + 1)  # beyond the system's largest
    heartbeats = known([idle(4), replace(idle(4), process=ended), near(idle(4))])
    for now, fault in ((1.0, None), (6.0, Fault(f"rank 1 ({ended}) ended suddenly", [1]))):
        heartbeats.find_gone(now)
        assert [each.gone_since for each in heartbeats.last] == [None, 1.0, None], (
            "only this machine's pids are checked"
        )
        assert diagnose(heartbeats, now, **TIMEOUTS) == fault
