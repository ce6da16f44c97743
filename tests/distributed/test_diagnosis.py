"""Knowledge of one rank about all ranks by their heartbeats, and the rank found at fault: the one that is behind and
stands still, never one that waits or works."""

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
    """Heartbeat of a rank of another machine at a place, with so many parts of it done."""
    return Heartbeat(1, ELSEWHERE, f"place {order}", [order, part], stalled, stopping=False)


def idle(order: int) -> Heartbeat:
    return at(order, IDLE, None)


def near(heartbeat: Heartbeat) -> Heartbeat:
    """Return the heartbeat as one of a rank of this machine."""
    return replace(heartbeat, process=HERE)


def known(ranks: Sequence[Heartbeat | LastHeartbeat], *, contact: float = 0.0, frozen_until: float = 0.0) -> Heartbeats:
    """Return what rank 0 has heard of the ranks: at 0 s, if nothing else is said."""
    last = [each if isinstance(each, LastHeartbeat) else LastHeartbeat(each, 0.0) for each in ranks]
    return Heartbeats(HERE, contact, last, frozen_until)


@pytest.mark.parametrize(
    ("ranks", "stuck"),
    [
        ([at(4, 1, 11), at(4, 0, 11)], [1]),  # one has not come to the exchange that the other waits in
        ([at(4, 1, 11), at(2, 0, 11), at(4, 1, 11)], [1]),
        ([at(4, 1, 11), at(4, 0, 11), at(4, 0, 11)], [1, 2]),
        ([at(4, 1, 11), at(4, 0, 9)], None),  # slow, and still within its time
        ([at(4, 1, 11), idle(2)], None),  # rank 1 does something that may take long, between two places
        ([idle(4), at(4, 0, 11)], [1]),  # rank 0 waits for it in a report
        ([at(5, 7, 11), idle(5)], [0]),  # rank 0 validates alone, and does not get on
        ([at(5, 7, 3), idle(5)], None),
        ([idle(5), at(5, 2, 11), idle(5)], [1]),  # a validation by all, the others are done
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
# Heartbeats known at a time, and the fault that they show.
CASES: dict[str, tuple[Heartbeats, float, Fault | None]] = {
    # The second has waited for the first.
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
    # Of ranks that were heard of a little before the contact was lost, none is called silent.
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
def test_what_is_wrong(known: Heartbeats, now: float, fault: Fault | None) -> None:
    assert diagnose(known, now, **TIMEOUTS) == fault


def test_silence_counts_sooner_when_a_peer_is_known_to_be_lost() -> None:
    heartbeats = known([LastHeartbeat(idle(4), 6.0), idle(4)], contact=6.0)
    fault = Fault(f"rank 1 (another, pid 1) gave no sign for 6 s: {SILENT}", [1])
    assert diagnose(heartbeats, 6.0, **TIMEOUTS | {"silent": 5.0}) == fault


def heard(*heartbeats: Heartbeat) -> Heartbeats:
    return known(heartbeats)


def test_a_heartbeat_is_read_as_it_was_written() -> None:
    for heartbeat in (FIRST, replace(FIRST, stalled=None, stopping=True, leaving=True, process=HERE)):
        assert Heartbeat.decode(heartbeat.encode().encode()) == heartbeat


def test_only_a_new_heartbeat_counts() -> None:
    heartbeats = heard(FIRST, FIRST)
    second = replace(FIRST, number=2)
    heartbeats.receive([second, FIRST], 7.0)
    assert heartbeats.last == [LastHeartbeat(second, 7.0), LastHeartbeat(FIRST, 0.0)]
    assert heartbeats.contact == 7.0, "the store has answered, whatever it has"


def test_a_heartbeat_from_before_the_others_went_on_blames_nobody() -> None:
    """Rank 0 has saved for long, and rank 1 waited for it. Then both go on, and only rank 0's heartbeat says so yet."""
    timeouts = {"stuck": 10.0, "silent": 20.0, "gone": 5.0}
    saving = replace(FIRST, place="global step 3", progress=[3, IDLE], stalled=None)
    heartbeats = heard(saving, replace(FIRST, stalled=12.0))
    assert diagnose(heartbeats, 0.0, **timeouts) is None

    def receive(second: int, other: Heartbeat) -> bool:
        """Rank 0 gets on; whether rank 1 is thought to be stuck."""
        heartbeats.receive([replace(FIRST, number=second + 1, progress=[6, second], stalled=0.0), other], second)
        fault = diagnose(heartbeats, second, **timeouts)
        assert fault is None or fault.ranks == [1]
        return fault is not None

    assert not receive(1, heartbeats.last[1].heartbeat)
    assert not receive(2, heartbeats.last[1].heartbeat)
    assert not receive(3, replace(FIRST, number=2, stalled=13.0)), "written before, and sent after"
    assert receive(4, replace(FIRST, number=3, stalled=14.0)), "it has not gone on"


def test_only_what_a_neighbour_has_told_need_not_be_told_again() -> None:
    leaving = replace(FIRST, leaving=True)
    assert not heard(FIRST, FIRST).is_fault_told()
    assert not heard(FIRST, leaving).is_fault_told()
    assert heard(FIRST, replace(leaving, process=HERE)).is_fault_told()


def test_a_rank_that_was_asked_to_stop() -> None:
    assert not heard(FIRST, FIRST).is_anyone_stopping()
    assert heard(FIRST, replace(FIRST, stopping=True)).is_anyone_stopping()


def test_neighbours_are_the_ranks_of_this_machine() -> None:
    assert heard(FIRST, replace(FIRST, process=HERE), replace(FIRST, process=replace(HERE, pid=1))).neighbours() == [
        1,
        2,
    ]


def test_nobodys_silence_counts_after_a_freeze() -> None:
    heartbeats = heard(FIRST, FIRST)
    heartbeats.forgive_freeze(20.0, grace_seconds=5.0)
    assert (heartbeats.contact, heartbeats.frozen_until) == (20.0, 25.0)
    assert [last.at for last in heartbeats.last] == [20.0, 20.0]


def test_a_process_of_this_machine_that_ended() -> None:
    """Found by its pid, long before the timeout, also while its parent has not asked for its status."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    name = replace(HERE, pid=child.pid)
    while not name.is_gone():
        time.sleep(0.01)
    assert child.returncode is None
    idle = replace(FIRST, stalled=None)
    heartbeats = heard(idle, replace(idle, process=name), replace(idle, process=HERE))
    heartbeats.find_gone(1.0)
    assert [last.gone_since for last in heartbeats.last] == [None, 1.0, None], "another machine's pids are not ours"
    assert diagnose(heartbeats, 1.0, **TIMEOUTS) is None
    heartbeats.find_gone(6.0)
    found = diagnose(heartbeats, 6.0, **TIMEOUTS)
    assert found is not None
    assert found.ranks == [1]
    assert "ended suddenly" in found.text
    child.wait()
    assert name.is_gone()
    assert not replace(name, pid=os.getpid()).is_gone()
