"""Noticing ranks that are stuck, silent or gone, and ending this process with a line that names them.

A gradient exchange waits for a rank that does not come, and cannot say which one that is. So every rank sends the
others heartbeats that say how far it is, through the store at which they met; threads of their own do that, and judge,
whatever the main thread waits for. Long work of one rank (a download, a save, a validation that goes on) is no fault:
only time without progress inside `guard` counts.

On CUDA the main thread only enqueues work, and runs ahead of a device that hangs. So with each milestone that it
passes it records an event behind that work, and the milestone counts once the device has got to the event. On the CPU
it counts at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.common.errors import EXIT, UserError, tell_soon
from harness.common.processes import ProcessName, is_launcher_gone
from harness.distributed.diagnosis import IDLE, Fault, Heartbeat, Heartbeats, LastHeartbeat, diagnose

if TYPE_CHECKING:
    import torch

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


@dataclass(frozen=True)
class Milestone:
    """A point in the work of a step that a rank passes."""

    place: str
    progress: list[int]  # the rank with less of it is behind
    is_guarded: bool  # whether this rank may not stand still here
    at: float  # when the main thread got there, by time.monotonic


@dataclass(frozen=True)
class Standing:
    """The place and progress of a rank, main thread and device together."""

    place: str
    progress: list[int]
    stalled: float | None  # seconds without progress; None where the rank may take its time


class Progress:
    """The milestones of one rank. Any thread may call any method."""

    def __init__(self, record: Callable[[], Callable[[], bool]] | None = None) -> None:
        """`record` marks the end of what the device has been given so far, and returns a function that says whether
        the device has got there; None where the main thread itself computes."""
        self._record = record
        self._lock = threading.RLock()  # a signal's handler may come in between
        self._reached = Milestone("the start", [-1, 0], False, time.monotonic())
        self._since = self._reached.at  # of the last progress
        self._ahead: deque[tuple[Milestone, Callable[[], bool]]] = deque()  # the device has not got there yet

    def reach(self, place: str, progress: list[int], *, is_guarded: bool) -> None:
        """The main thread passes a milestone."""
        milestone = Milestone(place, progress, is_guarded, time.monotonic())
        is_done = self._record() if self._record else None
        with self._lock:
            if is_done is None:
                self._reached, self._since = milestone, milestone.at
            else:
                self._ahead.append((milestone, is_done))

    def standing(self) -> Standing:
        """The place and progress of this rank now."""
        with self._lock:
            now = time.monotonic()
            while self._ahead and self._ahead[0][1]():
                self._reached, self._since = self._ahead.popleft()[0], now
            reached = self._reached
            if not self._ahead:
                return Standing(reached.place, reached.progress, now - self._since if reached.is_guarded else None)
            following = self._ahead[0][0]
            return Standing(following.place, reached.progress, now - max(self._since, following.at))

    def forgive(self) -> None:
        """This process was frozen: what stood still meanwhile counts from now on."""
        with self._lock:
            self._since = time.monotonic()


def device_progress(device: torch.device) -> Progress:
    """The progress of a rank that computes on `device`."""
    if device.type != "cuda":
        return Progress()
    import torch

    def record() -> Callable[[], bool]:
        """Put an event behind the work of the calling thread's stream; the function says whether the device is there,
        also in another thread."""
        event = torch.cuda.Event()
        event.record()

        def is_done() -> bool:
            torch.cuda.set_device(device)  # each thread has a current device, and another rank's is not to be touched
            try:
                return event.query()
            except RuntimeError:  # the device has failed: the main thread meets the same error, and tells it
                return False

        return is_done

    return Progress(record)


class Watchdog:
    """Watches all ranks from this one. `beat` and `guard` are for the main thread, and cost next to nothing.

    One that is not started, as in a world of one process, watches nobody.
    """

    def __init__(
        self,
        rank: int = 0,
        timeout_seconds: float = float("inf"),
        is_stopping: Callable[[], bool] = lambda: False,
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

    def start(self, store: Any, size: int, barrier: Callable[[], object]) -> None:
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

    def _exchange(self, store: Any, keys: list[str]) -> None:
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
            silent = min(self.timeout, GONE_PATIENCE_SECONDS) if EXIT.has_lost_peer else self.timeout
            fault = diagnose(self.heartbeats, now, stuck=self.timeout, silent=silent, gone=GONE_PATIENCE_SECONDS)
            if fault and not self._ended.is_set() and not EXIT.has_own_reason:
                self._leave(fault)

    def _leave(self, fault: Fault) -> None:
        """End this process; of each machine's ranks one says why."""
        EXIT.is_explained = True
        neighbours = self.heartbeats.neighbours()
        speakers = [rank for rank in neighbours if rank not in fault.ranks] or neighbours
        if self.rank == speakers[0]:
            tell_soon(f"{fault.text}; run the same command again to continue")
        else:
            # The launcher ends all ranks once one has left: let the line be written first.
            time.sleep(SILENT_EXIT_SECONDS)
        # Apart, because a store behind a cut network does not answer. Those who hear of it end without a word.
        self._leaving = True
        threading.Thread(target=self._announce, daemon=True).start()
        time.sleep(self._pause + 0.2)
        os._exit(1)

    def _announce(self) -> None:
        with suppress(RuntimeError):  # the store may be what is gone
            self._send(self._heartbeat(IDLE))


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
