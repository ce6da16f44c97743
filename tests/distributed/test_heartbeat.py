"""Knowledge of one rank about all ranks, by their heartbeats."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

from harness.common.processes import ProcessName
from harness.distributed.diagnosis import Timeouts, diagnose
from harness.distributed.heartbeat import IDLE, Heartbeat, Heartbeats, LastHeartbeat

OWN = ProcessName.own()
ELSEWHERE = ProcessName("another", 1, "another boot")
FIRST = Heartbeat(1, ELSEWHERE, "global step 4", [4, 0], 3.0, stopping=False)


def known(*heartbeats: Heartbeat) -> Heartbeats:
    return Heartbeats(OWN, 0.0, [LastHeartbeat(each, 0.0) for each in heartbeats])


def test_a_heartbeat_is_read_as_it_was_written() -> None:
    for heartbeat in (FIRST, replace(FIRST, stalled=None, stopping=True, leaving=True, process=OWN)):
        assert Heartbeat.decode(heartbeat.encode().encode()) == heartbeat


def test_only_a_new_heartbeat_counts() -> None:
    heartbeats = known(FIRST, FIRST)
    second = replace(FIRST, number=2)
    heartbeats.receive([second, FIRST], 7.0)
    assert heartbeats.last == [LastHeartbeat(second, 7.0), LastHeartbeat(FIRST, 0.0)]
    assert heartbeats.contact == 7.0, "the store has answered, whatever it has"


def test_a_heartbeat_from_before_the_others_went_on_blames_nobody() -> None:
    """Rank 0 has saved for long, and rank 1 waited for it. Then both go on, and only rank 0's heartbeat says so yet."""
    timeouts = Timeouts(stuck=10.0, silent=20.0, gone=5.0)
    saving = replace(FIRST, place="global step 3", progress=[3, IDLE], stalled=None)
    heartbeats = known(saving, replace(FIRST, stalled=12.0))
    assert diagnose(heartbeats, 0.0, timeouts) is None

    def receive(second: int, other: Heartbeat) -> bool:
        """Rank 0 gets on; whether rank 1 is thought to be stuck."""
        heartbeats.receive([replace(FIRST, number=second + 1, progress=[6, second], stalled=0.0), other], second)
        fault = diagnose(heartbeats, second, timeouts)
        assert fault is None or fault.ranks == [1]
        return fault is not None

    assert not receive(1, heartbeats.last[1].heartbeat)
    assert not receive(2, heartbeats.last[1].heartbeat)
    assert not receive(3, replace(FIRST, number=2, stalled=13.0)), "written before, and sent after"
    assert receive(4, replace(FIRST, number=3, stalled=14.0)), "it has not gone on"


def test_only_what_a_neighbour_has_told_need_not_be_told_again() -> None:
    leaving = replace(FIRST, leaving=True)
    assert not known(FIRST, FIRST).is_fault_told()
    assert not known(FIRST, leaving).is_fault_told()
    assert known(FIRST, replace(leaving, process=OWN)).is_fault_told()


def test_a_rank_that_was_asked_to_stop() -> None:
    assert not known(FIRST, FIRST).is_anyone_stopping()
    assert known(FIRST, replace(FIRST, stopping=True)).is_anyone_stopping()


def test_neighbours_are_the_ranks_of_this_machine() -> None:
    assert known(FIRST, replace(FIRST, process=OWN), replace(FIRST, process=replace(OWN, pid=1))).neighbours() == [1, 2]


def test_nobodys_silence_counts_after_a_freeze() -> None:
    heartbeats = known(FIRST, FIRST)
    heartbeats.forgive_freeze(20.0, grace_seconds=5.0)
    assert (heartbeats.contact, heartbeats.frozen_until) == (20.0, 25.0)
    assert [last.at for last in heartbeats.last] == [20.0, 20.0]


def test_a_process_of_this_machine_that_ended() -> None:
    """Found by its pid, long before the timeout, also while its parent has not asked for its status."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    name = replace(OWN, pid=child.pid)
    while not name.is_gone():
        time.sleep(0.01)
    assert child.returncode is None
    idle = replace(FIRST, stalled=None)
    heartbeats = known(idle, replace(idle, process=name), replace(idle, process=OWN))
    timeouts = Timeouts(stuck=10.0, silent=10.0, gone=5.0)
    heartbeats.find_gone(1.0)
    assert [last.gone_since for last in heartbeats.last] == [None, 1.0, None], "another machine's pids are not ours"
    assert diagnose(heartbeats, 1.0, timeouts) is None
    heartbeats.find_gone(6.0)
    found = diagnose(heartbeats, 6.0, timeouts)
    assert found is not None
    assert found.ranks == [1]
    assert "ended suddenly" in found.text
    child.wait()
    assert name.is_gone()
    assert not replace(name, pid=os.getpid()).is_gone()
