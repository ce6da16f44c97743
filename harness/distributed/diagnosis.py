"""Diagnosis of a fault among the ranks from their last heartbeats alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.distributed.heartbeat import Heartbeat, Heartbeats


@dataclass(frozen=True)
class Fault:
    """A fault in words, and the ranks at fault; no ranks, if it concerns all alike."""

    text: str
    ranks: list[int]


@dataclass(frozen=True)
class Timeouts:
    """After how many seconds something is a fault."""

    stuck: float  # no progress inside `Watchdog.guard`
    silent: float  # no heartbeat from a rank, or no answer from the store
    gone: float  # a process has ended; it may have told the reason itself


def diagnose(heartbeats: Heartbeats, now: float, timeouts: Timeouts) -> Fault | None:
    """The fault that explains the most: a rank that has ended is silent, too, and the others may be stuck for it."""
    return (
        _find_gone(heartbeats, now, timeouts.gone)
        or _find_lost_contact(heartbeats, now, timeouts.silent)
        or _find_silent(heartbeats, now, timeouts.silent)
        or _find_stuck(heartbeats, now, timeouts.stuck)
    )


def _find_gone(heartbeats: Heartbeats, now: float, timeout: float) -> Fault | None:
    gone = [
        rank
        for rank, last in enumerate(heartbeats.last)
        if last.gone_since is not None and now - last.gone_since >= timeout
    ]
    return Fault(f"{_names(heartbeats, gone)} ended suddenly", gone) if gone else None


def _find_lost_contact(heartbeats: Heartbeats, now: float, timeout: float) -> Fault | None:
    """The store does not answer: rank 0 holds it, or the torchrun beside it does."""
    seconds = now - heartbeats.contact
    # Of a rank that is gone more is known in a moment.
    if seconds <= timeout or heartbeats.last[0].gone_since is not None:
        return None
    process = heartbeats.last[0].heartbeat.process
    if process.is_neighbour_of(heartbeats.process):
        text = f"{_names(heartbeats, [0])}, or its torchrun, gave no answer for {seconds:.0f} s: frozen"
    else:
        text = f"no connection to rank 0's machine ({process.host}) for {seconds:.0f} s"
    return Fault(text, [0])


def _find_silent(heartbeats: Heartbeats, now: float, timeout: float) -> Fault | None:
    silent = [
        rank
        for rank, last in enumerate(heartbeats.last)
        # Without contact nobody can be heard; and of one that is gone more is known in a moment.
        if heartbeats.contact - last.at > timeout and last.gone_since is None
    ]
    if not silent:
        return None
    seconds = max(now - heartbeats.last[rank].at for rank in silent)
    names = _names(heartbeats, silent)
    return Fault(f"{names} gave no sign for {seconds:.0f} s: frozen, gone, or its machine is cut off", silent)


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
