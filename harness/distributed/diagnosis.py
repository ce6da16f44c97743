"""Heartbeats that ranks send one another, one rank's record of all ranks' last ones, and the fault that they show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from harness.common.processes import ProcessName

IDLE = 2**53  # parts done at a place by a rank that has nothing left to do there
# After the others have passed a rank, this many more of its heartbeats must say that it stands still. It may have gone
# on with them: its last one can be from before that, and the next one can have been written before, and sent after.
HEARTBEATS_TO_CONFIRM = 2


@dataclass(frozen=True)
class Heartbeat:
    """Status message that a rank sends from time to time."""

    number: int  # counts the heartbeats themselves
    process: ProcessName
    place: str
    progress: list[int]  # the rank with less of it is behind
    stalled: float | None  # seconds without progress; None outside `Watchdog.guard`
    stopping: bool  # a signal has asked it to stop
    leaving: bool = False  # it has noticed a fault, and has told the user, or left that to a neighbour

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Heartbeat:
        values = json.loads(text)
        return cls(**{**values, "process": ProcessName(**values["process"])})


@dataclass
class LastHeartbeat:
    """The last new heartbeat of a rank, and when it came by this process's clock."""

    heartbeat: Heartbeat
    at: float
    gone_since: float | None = None  # when its process was first seen to have ended
    to_confirm: int = 0  # heartbeats that are still to come from it before its standing still counts


@dataclass
class Heartbeats:
    """The last heartbeat of every rank. All times are those of this process's clock."""

    process: ProcessName  # this one
    contact: float  # when the store last answered
    last: list[LastHeartbeat] = field(default_factory=list)  # by rank
    frozen_until: float = 0.0  # until then heartbeats may come that are older than a freeze of this process

    def receive(self, heartbeats: Sequence[Heartbeat], now: float) -> None:
        """Take what the store has of every rank; only what is new in it counts."""
        self.contact = now
        before = self.last_of_all()
        for last, heartbeat in zip(self.last, heartbeats, strict=True):
            if heartbeat.number != last.heartbeat.number:
                last.heartbeat, last.at, last.to_confirm = heartbeat, now, max(0, last.to_confirm - 1)
        if self.last_of_all() != before:
            for last in self.last:
                last.to_confirm = HEARTBEATS_TO_CONFIRM

    def last_of_all(self) -> tuple[list[int], list[int]]:
        """The least progress of any rank, and the ranks that have it."""
        earliest = min(last.heartbeat.progress for last in self.last)
        return earliest, [rank for rank, last in enumerate(self.last) if last.heartbeat.progress == earliest]

    def find_gone(self, now: float) -> None:
        """Look which ranks of this machine have a process that has ended."""
        for last in self.last:
            process = last.heartbeat.process
            if last.gone_since is None and process.is_neighbour_of(self.process) and process.is_gone():
                last.gone_since = now

    def forgive_freeze(self, now: float, grace_seconds: float) -> None:
        """Restart the count of every rank's silence: this process was frozen and received no heartbeats."""
        self.contact = now
        self.frozen_until = now + grace_seconds
        for last in self.last:
            last.at = now

    def is_fault_told(self) -> bool:
        """True if a rank of this machine leaves because of a fault that has been reported on this machine's terminal;
        other machines have terminals of their own."""
        return any(self.last[rank].heartbeat.leaving for rank in self.neighbours())

    def is_anyone_stopping(self) -> bool:
        """True if a signal has asked any rank to stop."""
        return any(last.heartbeat.stopping for last in self.last)

    def neighbours(self) -> list[int]:
        """The ranks of this machine, this one included."""
        return [rank for rank, last in enumerate(self.last) if last.heartbeat.process.is_neighbour_of(self.process)]


# Diagnosis --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault in words, and the ranks at fault; no ranks, if it concerns all alike."""

    text: str
    ranks: list[int]


def diagnose(heartbeats: Heartbeats, now: float, *, stuck: float, silent: float, gone: float) -> Fault | None:
    """The fault that explains the most: a rank that has ended is silent, too, and the others may be stuck for it.

    After so many seconds something is a fault: no progress inside `Watchdog.guard` (`stuck`), no heartbeat from a rank
    or no answer from the store (`silent`), the end of a process, which may have told the reason itself (`gone`).
    """
    last = heartbeats.last
    ended = [rank for rank, each in enumerate(last) if each.gone_since is not None and now - each.gone_since >= gone]
    if ended:
        return Fault(f"{_names(heartbeats, ended)} ended suddenly", ended)
    # Rank 0 holds the store, or the torchrun beside it does. Of a rank that is gone more is known in a moment.
    if (seconds := now - heartbeats.contact) > silent and last[0].gone_since is None:
        store = last[0].heartbeat.process
        if not store.is_neighbour_of(heartbeats.process):
            return Fault(f"no connection to rank 0's machine ({store.host}) for {seconds:.0f} s", [0])
        return Fault(f"{_names(heartbeats, [0])}, or its torchrun, gave no answer for {seconds:.0f} s: frozen", [0])
    # Silence counts up to the store's last answer, since without contact nobody can be heard.
    quiet = [
        rank for rank, each in enumerate(last) if heartbeats.contact - each.at > silent and each.gone_since is None
    ]
    if quiet:
        seconds = max(now - last[rank].at for rank in quiet)
        names = _names(heartbeats, quiet)
        return Fault(f"{names} gave no sign for {seconds:.0f} s: frozen, gone, or its machine is cut off", quiet)
    return _find_stuck(heartbeats, now, stuck)


def _find_stuck(heartbeats: Heartbeats, now: float, timeout: float) -> Fault | None:
    """The ranks that are behind all others, if they stand still where they should not."""
    if now < heartbeats.frozen_until or any(now - last.at > timeout / 2 for last in heartbeats.last):
        return None  # what a rank said last is old: soon it has sent another heartbeat, or is known to be frozen
    beats: list[Heartbeat] = [last.heartbeat for last in heartbeats.last]
    _, behind = heartbeats.last_of_all()
    stalled = [beats[rank].stalled for rank in behind]
    if None in stalled or any(heartbeats.last[rank].to_confirm for rank in behind):
        return None
    # The last to come there: before it came, the others rightly waited for it.
    seconds = min(each or 0.0 for each in stalled)
    if seconds <= timeout:
        return None
    place = beats[behind[0]].place
    if len(behind) == len(beats):
        return Fault(f"no rank got beyond {place} for {seconds:.0f} s: a device or the network does not answer", [])
    return Fault(f"{_names(heartbeats, behind)} stuck for {seconds:.0f} s in {place}", behind)


def _names(heartbeats: Heartbeats, ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank} ({heartbeats.last[rank].heartbeat.process})" for rank in ranks)
