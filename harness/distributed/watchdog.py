"""Noticing ranks that are stuck, silent or gone, and ending this process with a line that names them.

A gradient exchange waits for a rank that does not come, and cannot say which one that is. So every rank sends the
others heartbeats that say how far it is, through the store at which they met; threads of their own do that, and judge,
whatever the main thread waits for. Long work of one rank (a download, a save, a validation that goes on) is no fault:
only time without progress inside `guard` counts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from harness.common.errors import UserError, tell_soon
from harness.common.exit import EXIT
from harness.common.processes import ProcessName, is_launcher_gone
from harness.distributed.diagnosis import Fault, Timeouts, diagnose
from harness.distributed.heartbeat import IDLE, Heartbeat, Heartbeats, LastHeartbeat
from harness.distributed.progress import Progress

DEFAULT_TIMEOUT_SECONDS = 600.0
LONGEST_TIMEOUT_SECONDS = 7 * 86400.0
TIMEOUT_VARIABLE = "COLLECTIVE_TIMEOUT_SECONDS"
POLL_SECONDS = 2.0
POLLS_IN_TIMEOUT = 5
# A rank that ends because of an error tells it itself, and its peers' main threads hear of it: let them speak first.
GONE_PATIENCE_SECONDS = 5.0
SILENT_EXIT_SECONDS = 2.0


# What ranks do in a global step and may be stuck in, in this order, and how it is told.
PLACES = {
    "step": "global step {}",
    "report": "the device's work of global step {}",
    "validation": "the validation of global step {}",
    "benchmarks": "the benchmarks of global step {}",
    "check": "the check of weights after global step {}",
}


@dataclass(frozen=True)
class Place:
    """The work of a rank in global step `step`: the one of PLACES called `name`."""

    step: int
    name: str

    @property
    def order(self) -> int:
        """Grows from place to place, and is the same on all ranks."""
        return len(PLACES) * self.step + list(PLACES).index(self.name)

    def __str__(self) -> str:
        return PLACES[self.name].format(self.step)


class Store(Protocol):
    """The methods of torch.distributed's stores that are used here."""

    def set(self, key: str, value: str) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


def never() -> bool:
    return False


class Watchdog:
    """This rank's eye on all of them. `beat` and `guard` are for the main thread, and cost next to nothing."""

    def __init__(
        self,
        rank: int,
        timeout_seconds: float,
        is_stopping: Callable[[], bool] = never,
        progress: Progress | None = None,
    ) -> None:
        """`is_stopping` says whether a signal has asked this rank to stop; another thread than the main one asks.
        `progress` is that of the rank's device; None: the main thread's own."""
        self.rank = rank
        self.timeout = timeout_seconds
        self.heartbeats = Heartbeats(ProcessName.own(), time.monotonic())
        self._is_stopping = is_stopping
        self._progress = progress or Progress()
        self._place: Place | None = None
        self._parts = 0  # done at the place
        self._is_guarded = False
        self._ended = threading.Event()
        self._leaving = False
        self._send: Callable[[Heartbeat], None] = lambda heartbeat: None

    @contextmanager
    def guard(self, place: Place) -> Iterator[None]:
        """Inside, standing still for longer than the timeout is a fault."""
        self._pass(place, 0, is_guarded=True)
        try:
            yield
        finally:
            self.idle(place)

    def idle(self, place: Place) -> None:
        """This rank has nothing left to do at a place, and may take its time, or waits for the others."""
        self._pass(place, IDLE, is_guarded=False)

    def beat(self) -> None:
        """The main thread has got a part further inside the place it is at; the same parts on all ranks."""
        if self._place is not None:
            self._pass(self._place, self._parts + 1, is_guarded=self._is_guarded)

    def _pass(self, place: Place, parts: int, *, is_guarded: bool) -> None:
        self._place, self._parts, self._is_guarded = place, parts, is_guarded
        self._progress.reach(str(place), [place.order, parts], is_guarded=is_guarded)

    def start(self, store: Store, size: int, barrier: Callable[[], object]) -> None:
        """Begin to watch `size` ranks. `barrier` returns when every rank has called it."""
        keys = [f"heartbeat/{rank}" for rank in range(size)]
        self._send = lambda heartbeat: store.set(keys[self.rank], heartbeat.encode())
        self._send(self._heartbeat(0))
        barrier()
        self.heartbeats.contact = now = time.monotonic()
        self.heartbeats.last = [LastHeartbeat(Heartbeat.decode(text), now) for text in store.multi_get(keys)]
        # Apart, because a store behind a cut network answers a call neither with a value nor with an error.
        threading.Thread(target=self._exchange, args=(store, keys), daemon=True, name="watchdog-heartbeats").start()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def is_anyone_stopping(self) -> bool:
        """True if a signal has asked any rank to stop, as far as is known by now."""
        return self.heartbeats.is_anyone_stopping()

    def stop(self) -> None:
        """No more heartbeats, and no more judging; what is under way may still end."""
        self._ended.set()

    def _heartbeat(self, number: int) -> Heartbeat:
        own, standing = self.heartbeats.process, self._progress.standing()
        return Heartbeat(
            number, own, standing.place, standing.progress, standing.stalled, self._is_stopping(), self._leaving
        )

    @property
    def _pause(self) -> float:
        return min(POLL_SECONDS, self.timeout / POLLS_IN_TIMEOUT)

    def _exchange(self, store: Store, keys: list[str]) -> None:
        """Send this rank's heartbeats and fetch the others'."""
        number = 0
        # torchrun keeps the store: if it has been killed, the ranks end soon, and tell why themselves.
        while not self._ended.wait(self._pause) and not is_launcher_gone():
            number += 1
            try:
                self._send(self._heartbeat(number))
                received = [Heartbeat.decode(text) for text in store.multi_get(keys)]
            except RuntimeError:  # no contact: `diagnose` counts the seconds
                continue
            self.heartbeats.receive(received, time.monotonic())

    def _watch(self) -> None:
        """Look at the heartbeats now and then, and end this process when they show a fault."""
        looked = time.monotonic()
        while not self._ended.wait(self._pause) and not is_launcher_gone():
            now = time.monotonic()
            if now - looked > self.timeout / 2:  # it was this process that was frozen
                self.heartbeats.forgive_freeze(now, grace_seconds=self.timeout / 2)
                self._progress.forgive()
            looked = now
            if self.heartbeats.is_fault_told() and not EXIT.has_own_reason:
                os._exit(1)
            self.heartbeats.find_gone(now)
            fault = diagnose(self.heartbeats, now, self._timeouts())
            if fault and not self._ended.is_set() and not EXIT.has_own_reason:
                self._leave(fault)

    def _timeouts(self) -> Timeouts:
        silent = min(self.timeout, GONE_PATIENCE_SECONDS) if EXIT.has_lost_peer else self.timeout
        return Timeouts(stuck=self.timeout, silent=silent, gone=GONE_PATIENCE_SECONDS)

    def _leave(self, fault: Fault) -> None:
        """End this process; of each machine's ranks one says why."""
        EXIT.is_explained = True
        neighbours = self.heartbeats.neighbours()
        speakers = [rank for rank in neighbours if rank not in fault.ranks] or neighbours
        if self.rank == speakers[0]:
            tell_soon(f"{fault.text}; run the same command again to continue")
        else:
            time.sleep(
                SILENT_EXIT_SECONDS
            )  # the launcher ends all ranks once one has left: let the line be written first
        # Apart, because a store behind a cut network does not answer. Those who hear of it end without a word.
        self._leaving = True
        threading.Thread(target=self._announce, daemon=True).start()
        time.sleep(self._pause + 0.2)
        os._exit(1)

    def _announce(self) -> None:
        with suppress(RuntimeError):  # the store may be what is gone
            self._send(self._heartbeat(IDLE))


class NoWatchdog(Watchdog):
    """A watchdog for a world of one process, which waits for no other."""

    def __init__(self) -> None:
        super().__init__(0, float("inf"))


def collective_timeout_seconds() -> float:
    """Seconds that a rank may stand still in an exchange, from the environment or the default. Raises UserError if the
    variable is not a number of seconds in range."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_TIMEOUT_SECONDS:
        raise UserError(
            f"{TIMEOUT_VARIABLE}: {text!r} is not a number of seconds; unset it for {DEFAULT_TIMEOUT_SECONDS:g}"
        )
    return seconds
