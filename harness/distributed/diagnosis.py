"""Heartbeats that ranks send one another, the record of every rank's last heartbeat, and the diagnosis of faults."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from harness.common.processes import ProcessName

IDLE = 2**53  # stands for the number of parts done once a rank has finished its work at a place
# A rank that the other ranks have passed must send this many more heartbeats without progress before it counts as
# stuck. It may have made progress together with the others: its last received heartbeat may be older than this
# progress, and the next one may have been written before the progress and sent after it.
HEARTBEATS_TO_CONFIRM = 2


@dataclass(frozen=True)
class Heartbeat:
    """Status message that a rank sends regularly."""

    number: int  # number of this heartbeat among those of its rank
    process: ProcessName
    place: str
    progress: list[int]  # [Place.order, parts done]: a rank with a smaller list is behind
    stalled: float | None  # seconds without progress; None where a lack of progress is no fault
    stopping: bool  # this rank has a reason to stop: a signal, or a ceiling of time or cost
    leaving: bool = False  # this rank ends because of a fault that it or another rank of its machine prints

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Heartbeat:
        values = json.loads(text)
        return cls(**{**values, "process": ProcessName(**values["process"])})


@dataclass
class LastHeartbeat:
    """The last heartbeat of a rank, and the time from which its silence is counted."""

    heartbeat: Heartbeat
    at: float  # like all times here, by time.monotonic
    gone_since: float | None = None  # when this rank's process was first seen to have ended
    to_confirm: int = 0  # heartbeats that the rank must still send before it can count as stuck


@dataclass
class Heartbeats:
    """The last heartbeat of every rank."""

    process: ProcessName  # this process
    contact: float  # when the store last answered
    last: list[LastHeartbeat] = field(default_factory=list)  # by rank
    frozen_until: float = 0.0  # until this time, received heartbeats may be from before this process was frozen

    def receive(self, heartbeats: Sequence[Heartbeat], now: float) -> None:
        """Record the newest heartbeat of each rank, in the order of the ranks, received at the time `now`."""
        self.contact = now
        before = self.least_progress()
        for last, heartbeat in zip(self.last, heartbeats, strict=True):
            if heartbeat.number != last.heartbeat.number:
                last.heartbeat, last.at, last.to_confirm = heartbeat, now, max(0, last.to_confirm - 1)
        if self.least_progress() != before:
            for last in self.last:
                last.to_confirm = HEARTBEATS_TO_CONFIRM

    def least_progress(self) -> tuple[list[int], list[int]]:
        """Return the least progress of any rank, and the ranks that have it."""
        earliest = min(last.heartbeat.progress for last in self.last)
        return earliest, [rank for rank, last in enumerate(self.last) if last.heartbeat.progress == earliest]

    def find_gone(self, now: float) -> None:
        """Record the ranks of this machine whose process has ended."""
        for last in self.last:
            process = last.heartbeat.process
            if last.gone_since is None and process.is_neighbor_of(self.process) and process.is_gone():
                last.gone_since = now

    def forgive_freeze(self, now: float, grace_seconds: float) -> None:
        """After this process was frozen, count anew the seconds since each rank's last heartbeat and since the store's
        last answer. For the next `grace_seconds`, no rank counts as stuck."""
        self.contact = now
        self.frozen_until = now + grace_seconds
        for last in self.last:
            last.at = now

    def is_fault_told(self) -> bool:
        """Return True if a rank of this machine is ending because of a fault that has been printed on this machine."""
        return any(self.last[rank].heartbeat.leaving for rank in self.neighbors())

    def name_of(self, rank: int) -> str:
        """Return a rank's number and, in brackets, its machine and its process."""
        return f"rank {rank} ({self.last[rank].heartbeat.process})"

    def neighbors(self) -> list[int]:
        """Return all ranks of this machine."""
        return [rank for rank, last in enumerate(self.last) if last.heartbeat.process.is_neighbor_of(self.process)]


# Diagnosis --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Description of a fault, and the ranks that caused it (none if the fault concerns all ranks alike)."""

    text: str
    ranks: list[int]


def diagnose(heartbeats: Heartbeats, now: float, *, stuck: float, silent: float, gone: float) -> Fault | None:
    """Return the fault to report at the time `now`, or None if there is none. Each limit is in seconds:

    - `stuck`: without progress inside `Watchdog.guard`
    - `silent`: without a rank's heartbeat, or without the store's answer
    - `gone`: since a rank's process was first seen to have ended
    """
    last = heartbeats.last
    # The checks are ordered from causes to effects. A rank whose process has ended is also silent, and other ranks may
    # be stuck because they wait for it.
    ended = [rank for rank, each in enumerate(last) if each.gone_since is not None and now - each.gone_since >= gone]
    if ended:
        return Fault(f"{_names(heartbeats, ended)} ended suddenly", ended)
    # The store is in rank 0's process or in the torchrun on its machine. If rank 0's process has ended, the check of
    # `ended` above soon reports that. Its message says more.
    if (seconds := now - heartbeats.contact) > silent and last[0].gone_since is None:
        store = last[0].heartbeat.process
        if not store.is_neighbor_of(heartbeats.process):
            return Fault(f"no answer from rank 0's machine ({store.host}) for {seconds:.0f} s", [0])
        return Fault(f"{_names(heartbeats, [0])}, or its torchrun, gave no answer for {seconds:.0f} s: frozen", [0])
    # Silence is counted up to the store's last answer, because without the store no heartbeat can arrive.
    quiet = [
        rank for rank, each in enumerate(last) if heartbeats.contact - each.at > silent and each.gone_since is None
    ]
    if quiet:
        seconds = max(now - last[rank].at for rank in quiet)
        names = _names(heartbeats, quiet)
        return Fault(f"{names} gave no sign for {seconds:.0f} s: frozen, gone, or on a machine that is cut off", quiet)
    # The ranks that are behind all others count as stuck if they make no progress inside `Watchdog.guard`.
    if now < heartbeats.frozen_until or any(now - each.at > stuck / 2 for each in last):
        return None  # a heartbeat is old: its rank soon sends another one or counts as silent
    _, behind = heartbeats.least_progress()
    stalled = [last[rank].heartbeat.stalled for rank in behind]
    if None in stalled or any(last[rank].to_confirm for rank in behind):
        return None
    # The seconds count from the time when the last of these ranks arrived at this place. Until then, the others rightly
    # waited for it.
    seconds = min(each or 0.0 for each in stalled)
    if seconds <= stuck:
        return None
    place = last[behind[0]].heartbeat.place
    if len(behind) == len(last):
        return Fault(f"no rank got beyond {place} for {seconds:.0f} s: a device or the network does not answer", [])
    return Fault(f"{_names(heartbeats, behind)} made no progress for {seconds:.0f} s in {place}", behind)


def _names(heartbeats: Heartbeats, ranks: Sequence[int]) -> str:
    return " and ".join(map(heartbeats.name_of, ranks))
