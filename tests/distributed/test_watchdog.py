"""Which rank the watch finds at fault: the one that is behind and stands still, never one that waits or works."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from harness.common.lock import ProcessName
from harness.distributed.watchdog import (
    GONE_PATIENCE_SECONDS,
    IDLE,
    Heartbeat,
    LastHeartbeat,
    NoWatchdog,
    Place,
    Watchdog,
)

TIMEOUT = 10.0
ELSEWHERE = ProcessName("another", 1, "another boot")


def sign(order: int, part: int, stalled: float | None) -> Heartbeat:
    return Heartbeat(1, ELSEWHERE, f"place {order}", [order, part], stalled, stopping=False)


def watching(*signs: Heartbeat, at: float = 0.0) -> Watchdog:
    """Rank 0's watch, having just heard these signs."""
    watch = Watchdog(0, TIMEOUT)
    watch._contact = at
    watch._heard = [LastHeartbeat(each, at) for each in signs]
    return watch


def at_leisure(order: int) -> Heartbeat:
    return sign(order, IDLE, None)


@pytest.mark.parametrize(
    ("signs", "guilty"),
    [
        ([sign(4, 1, 11), sign(4, 0, 11)], [1]),  # one has not come to the exchange that the other waits in
        ([sign(4, 1, 11), sign(2, 0, 11), sign(4, 1, 11)], [1]),
        ([sign(4, 1, 11), sign(4, 0, 11), sign(4, 0, 11)], [1, 2]),
        ([sign(4, 1, 11), sign(4, 0, 9)], None),  # slow, and still within its time
        ([sign(4, 1, 11), at_leisure(2)], None),  # rank 1 does something that may take long, between two places
        ([at_leisure(4), sign(4, 0, 11)], [1]),  # rank 0 waits for it in a report
        ([sign(5, 7, 11), at_leisure(5)], [0]),  # rank 0 validates alone, and does not get on
        ([sign(5, 7, 3), at_leisure(5)], None),
        ([at_leisure(5), sign(5, 2, 11), at_leisure(5)], [1]),  # a validation by all, the others are done
        ([at_leisure(-1), at_leisure(-1)], None),  # a download before the first step
    ],
)
def test_who_is_stuck(signs: list[Heartbeat], guilty: list[int] | None) -> None:
    found = watching(*signs)._find_fault(0.0)
    assert (found and found[1]) == guilty
    if found and guilty:
        assert f"rank {guilty[0]} (another, pid 1)" in found[0]
        assert "stuck for 11 s in place" in found[0]


def test_only_what_a_neighbour_has_told_need_not_be_told_again() -> None:
    leaving = replace(sign(4, 0, 3), leaving=True)
    assert not watching(sign(4, 0, 3), sign(4, 0, 3))._is_told()
    assert not watching(sign(4, 0, 3), leaving)._is_told()
    assert watching(sign(4, 0, 3), replace(leaving, process=ProcessName.own()))._is_told()


def test_all_in_one_exchange_is_nobodys_fault() -> None:
    assert watching(sign(4, 1, 9), sign(4, 1, 12))._find_fault(0.0) is None  # the second has waited for the first
    found = watching(sign(4, 1, 11), sign(4, 1, 12))._find_fault(0.0)
    assert found == ("no rank got beyond place 4 for 11 s: a device or the network does not answer", [])


def hear_from_rank0(watch: Watchdog, now: float) -> None:
    watch._heard[0].at = watch._contact = now


def test_a_rank_that_gives_no_sign() -> None:
    watch = watching(at_leisure(4), at_leisure(4))
    hear_from_rank0(watch, 9.0)
    assert watch._find_fault(9.0) is None
    hear_from_rank0(watch, 11.0)
    found = watch._find_fault(11.0)
    assert found is not None
    assert found[1] == [1]
    assert "rank 1 (another, pid 1) gave no sign for 11 s" in found[0]


def test_a_rank_is_not_judged_by_what_it_said_long_ago() -> None:
    """Both were in one exchange; then one froze, and is about to be found silent."""
    watch = watching(sign(4, 1, 11), sign(4, 1, 1))
    watch._heard[1].at = 2.0
    hear_from_rank0(watch, 11.0)
    assert watch._find_fault(11.0) is None
    hear_from_rank0(watch, 12.5)
    found = watch._find_fault(12.5)
    assert found is not None
    assert found[1] == [1]


def test_no_contact_to_anybody() -> None:
    found = watching(at_leisure(4), at_leisure(4))._find_fault(11.0)
    assert found == ("no connection to rank 0's machine (another) for 11 s", [0])


def test_without_contact_nobody_else_is_to_blame() -> None:
    """Of ranks that were heard of a little before the contact was lost, none is called silent."""
    watch = watching(at_leisure(4), at_leisure(4))
    watch._contact = 0.5
    assert watch._find_fault(10.2) is None


def test_a_process_of_this_machine_that_ended() -> None:
    """Found by its pid, long before the timeout, also while its parent has not asked for its status."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    name = replace(ProcessName.own(), pid=child.pid)
    while not name.is_gone():
        time.sleep(0.01)
    assert child.returncode is None
    watch = watching(at_leisure(4), replace(at_leisure(4), process=name))
    assert watch._find_fault(1.0) is None
    found = watch._find_fault(1.0 + GONE_PATIENCE_SECONDS)
    assert found is not None
    assert found[1] == [1]
    assert "ended suddenly" in found[0]
    child.wait()
    assert name.is_gone()
    assert not replace(name, pid=os.getpid()).is_gone()


class DictStore:
    """What a TCPStore does, in one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key].encode() for key in keys]


def test_signs_travel_through_the_store() -> None:
    store, meeting = DictStore(), threading.Barrier(2)
    watches = [Watchdog(rank, timeout_seconds=0.5) for rank in range(2)]
    other = threading.Thread(target=watches[1].start, args=(store, 2, meeting.wait))
    other.start()
    watches[0].start(store, 2, meeting.wait)
    other.join()
    try:
        with watches[1].guard(Place(3, "step")):
            watches[1].beat()
            deadline = time.monotonic() + 5
            while watches[0]._heard[1].sign.progress != [Place(3, "step").order, 1]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert watches[0]._heard[1].sign.place == "global step 3"
            assert watches[0]._heard[1].sign.stalled is not None
        while watches[0]._heard[1].sign.progress != [Place(3, "step").order, IDLE]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert watches[0]._heard[1].sign.stalled is None
    finally:
        for watch in watches:
            watch.stop()


def test_alone_there_is_nothing_to_watch() -> None:
    watch = NoWatchdog()
    with watch.guard(Place(0, "step")):
        watch.beat()
    watch.idle(Place(0, "step"))
    watch.stop()
