"""Detection of ranks that are stuck, silent or gone. If the watchdog finds one, it ends this process, and one rank of
each machine prints the reason. Ranks send heartbeats to one another, through the store of the rendezvous.

- Stuck: no progress for too long inside `Watchdog.guard`. Elsewhere, a rank may work for long.
- Silent: no heartbeat of the rank arrives.
- Gone: the rank's process on this machine has ended.

On CUDA, work counts as progress once the device has done it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
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
# A rank that ends with an error prints it, and the main threads of its peers notice the lost connection. The watchdog
# waits this long, so that these messages come first.
GONE_PATIENCE_SECONDS = 5.0
SILENT_EXIT_SECONDS = 2.0
TIMED_STEPS = 64  # `Watchdog.own_seconds` takes the median of at most this many steps, the newest


# Places of a global step where a rank can be stuck, in order, and their names in messages. "machine" stands for all
# measurements of check_machine.py, which has no steps.
PLACES = {
    "start": "the first exchange between the ranks",
    "step": "global step {}",
    "report": "the device's work on global step {}",
    "validation": "the validation of global step {}",
    "benchmarks": "the benchmarks of global step {}",
    "check": "the check of weights after global step {}",
    "machine": "the check of the machine",
}


@dataclass(frozen=True)
class Place:
    """Part of a global step in which a rank is working. `name` is a key of PLACES, such as "validation"."""

    step: int
    name: str

    @property
    def order(self) -> int:
        """Number of this place, counted through all places of all global steps."""
        return len(PLACES) * self.step + list(PLACES).index(self.name)

    def __str__(self) -> str:
        return PLACES[self.name].format(self.step)


FIRST_EXCHANGE = Place(0, "start")


@dataclass(frozen=True)
class Milestone:
    """Point that a rank passes in its work: its start, or a call of `Watchdog.guard`, `beat` or `idle`."""

    place: str
    progress: list[int]  # [Place.order, parts done]: a rank with a smaller list is behind
    is_guarded: bool  # true if a lack of progress here is a fault
    at: float  # when this process reached it, by time.monotonic; a GPU may reach it later


@dataclass(frozen=True)
class Standing:
    """Place where a rank is working, and its progress, which counts the work that its device has done."""

    place: str
    progress: list[int]
    stalled: float | None  # seconds without progress; None where a lack of progress is no fault


class Progress:
    """Milestones that this rank has passed. Any thread may call any method."""

    def __init__(self, record: Callable[[], Callable[[], bool]] | None = None) -> None:
        """Create the progress of a rank at its start. `record` returns a DeviceMark, which the device reaches
        once it has done all work that it has been given so far. On a CPU, `record` is None."""
        self._record = record
        self._lock = threading.RLock()  # reentrant, because a signal handler may interrupt a method
        self._reached = Milestone("the start", [-1, 0], False, time.monotonic())
        self._since = self._reached.at  # time of the last progress
        self._ahead: deque[tuple[Milestone, Callable[[], bool]]] = deque()  # the device has not reached these yet

    def reach(self, place: str, progress: list[int], *, is_guarded: bool) -> Any:
        """Record that this rank passes a Milestone with these fields now. Returns the time, by `time.monotonic`,
        or on a GPU a DeviceMark. The difference between two such values is in seconds."""
        milestone = Milestone(place, progress, is_guarded, time.monotonic())
        # On CUDA the main thread only enqueues work, and continues to do so when the device hangs.
        is_done = self._record() if self._record else None
        with self._lock:
            if is_done is None:
                self._reached, self._since = milestone, milestone.at
            else:
                self._ahead.append((milestone, is_done))
        return milestone.at if is_done is None else is_done

    def standing(self) -> Standing:
        """Return the place and progress of this rank now."""
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
        """Restart the count of seconds without progress, after this process was frozen."""
        with self._lock:
            self._since = time.monotonic()


class DeviceMark:
    """CUDA event after all work that the calling thread's stream on `device` has been given so far."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cuda, self._device, self._event = torch.cuda, device, torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __call__(self) -> bool:
        """Return True if the device has reached the event. Any thread may call this."""
        # the current device is per thread, and the default one may belong to another rank
        self._cuda.set_device(self._device)
        try:
            return self._event.query()
        except RuntimeError:  # the device has failed: the main thread gets the same error and prints it
            return False

    def __sub__(self, earlier: DeviceMark) -> float:
        """Return the seconds between two events that the device has reached."""
        return earlier._event.elapsed_time(self._event) / 1000


def device_progress(device: torch.device) -> Progress:
    """Return the Progress of a rank that computes on `device`."""
    return Progress(partial(DeviceMark, device) if device.type == "cuda" else None)


class Watchdog:
    """Watcher of all ranks, in threads of this rank's process. `guard`, `beat` and `idle` must not be called
    concurrently. Until the watchdog is started, it watches no rank."""

    def __init__(
        self,
        rank: int = 0,
        timeout_seconds: float = float("inf"),
        is_stopping: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
    ) -> None:
        """Create a watchdog without starting it. `is_stopping` returns True if this rank has a reason to stop. The
        watchdog's threads call it. `progress` is the Progress of the rank's device. None means a CPU."""
        self.rank = rank
        self.timeout = timeout_seconds
        self._pause = min(POLL_SECONDS, timeout_seconds / POLLS_IN_TIMEOUT)
        self.heartbeats = Heartbeats(ProcessName.own(), time.monotonic())
        self._is_stopping = is_stopping
        self._progress = progress or Progress()
        self._place: Place | None = None
        self._parts = 0  # parts done at `_place`
        self._is_guarded = False
        self._last_beat: Any = None  # time of the last `beat` inside the present `guard`
        self._step_times: deque[tuple[Any, Any]] = deque(maxlen=TIMED_STEPS)  # of each step's start and last `beat`
        self._ended = threading.Event()
        self._leaving = False
        self._send: Callable[[Heartbeat], None] = lambda heartbeat: None

    @contextmanager
    def guard(self, place: Place) -> Iterator[None]:
        """Context manager for the work at `place`. In the body, a lack of progress is a fault after the timeout. A
        `beat` is progress. If `place` is a step, records the times of its start and last `beat`, for `own_seconds`."""
        begun, self._last_beat = self._pass(place, 0, is_guarded=True), None
        try:
            yield
        finally:
            if place.name == "step" and self._last_beat is not None:
                self._step_times.append((begun, self._last_beat))
            self.idle(place)

    def idle(self, place: Place) -> None:
        """Record that this rank has finished its work at `place`. Once the device has done this work, a lack of
        progress is no fault, because the rank may be waiting for others."""
        self._pass(place, IDLE, is_guarded=False)

    def beat(self) -> None:
        """Record that this rank has done one more part of the work at its current place. Parts must be about
        equally large on all ranks, because the watchdog compares the ranks' counts."""
        if self._place is not None:
            self._last_beat = self._pass(self._place, self._parts + 1, is_guarded=self._is_guarded)

    def own_seconds(self) -> float:
        """Return the median seconds from a step's beginning to this rank's last gradient, over the newest steps since
        the last call, or 0 if no step was timed. On CUDA the device must have finished the steps."""
        import statistics  # here, because --help imports this module

        # The rest of a step waits for other ranks, so it says nothing about this rank.
        seconds = [last - begun for begun, last in self._step_times]
        self._step_times.clear()
        return statistics.median(seconds) if seconds else 0.0

    def _pass(self, place: Place, parts: int, *, is_guarded: bool) -> Any:
        self._place, self._parts, self._is_guarded = place, parts, is_guarded
        return self._progress.reach(str(place), [place.order, parts], is_guarded=is_guarded)

    def start(self, store: Any, size: int, barrier: Callable[[], object]) -> None:
        """Start the threads that watch `size` ranks through `store`. `barrier` must return only after every rank has
        called it. Collective."""
        # An all-reduce that waits for a rank cannot say for which one. Heartbeats can.
        keys = [f"heartbeat/{rank}" for rank in range(size)]
        self._send = lambda heartbeat: store.set(keys[self.rank], heartbeat.encode())
        self._send(self._heartbeat(0))
        barrier()
        self.heartbeats.contact = now = time.monotonic()
        self.heartbeats.last = [LastHeartbeat(Heartbeat.decode(text), now) for text in store.multi_get(keys)]
        # In its own thread, because a call of the store neither returns nor raises if the network is cut.
        threading.Thread(target=self._exchange, args=(store, keys), daemon=True, name="watchdog-heartbeats").start()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def is_anyone_stopping(self) -> bool:
        """Return True if any rank has a reason to stop, according to the heartbeats received so far."""
        return any(last.heartbeat.stopping for last in self.heartbeats.last)

    def stop(self) -> None:
        """Stop sending and checking heartbeats."""
        self._ended.set()

    def _heartbeat(self, number: int) -> Heartbeat:
        standing = vars(self._progress.standing())
        return Heartbeat(
            number, self.heartbeats.process, **standing, stopping=self._is_stopping(), leaving=self._leaving
        )

    def _exchange(self, store: Any, keys: list[str]) -> None:
        """Send this rank's heartbeats and receive those of all ranks, until the watchdog is stopped or the launcher has
        ended."""
        number = 0
        # The launcher may hold the store. If it has been killed, the ranks end soon and print the reason themselves.
        while not self._ended.wait(self._pause) and not is_launcher_gone():
            number += 1
            try:
                self._send(self._heartbeat(number))
                received = [Heartbeat.decode(text) for text in store.multi_get(keys)]
            except RuntimeError:  # no contact: `diagnose` counts the seconds
                continue
            self.heartbeats.receive(received, time.monotonic())

    def _watch(self) -> None:
        """Check the heartbeats regularly, and end this process if there is a fault."""
        looked = time.monotonic()
        while not self._ended.wait(self._pause) and not is_launcher_gone():
            now = time.monotonic()
            if now - looked > self.timeout / 2:  # this process itself was frozen
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
        """End this process because of `fault`. One rank of each machine prints the reason."""
        EXIT.is_explained = True
        neighbors = self.heartbeats.neighbors()
        speakers = [rank for rank in neighbors if rank not in fault.ranks] or neighbors
        if self.rank == speakers[0]:
            reason = EXIT.peer_reason
            more = f"before that, a rank failed: {reason}" if reason else f"{EXIT.again} to continue"
            tell_soon(f"{fault.text}; {more}")
        else:
            # The launcher ends all ranks once one has left, so wait until the other rank has printed the line.
            time.sleep(SILENT_EXIT_SECONDS)

        def announce() -> None:
            """Send a heartbeat that lets the other ranks of this machine end without printing anything."""
            with suppress(RuntimeError):  # the store itself may be gone
                self._send(self._heartbeat(IDLE))

        self._leaving = True
        # In its own thread, because the store does not answer if the network is cut.
        threading.Thread(target=announce, daemon=True).start()
        time.sleep(self._pause + 0.2)
        os._exit(1)


def collective_timeout_seconds() -> float:
    """Return the seconds without progress after which the watchdog reports a fault, from COLLECTIVE_TIMEOUT_SECONDS or
    the default. Raises UserError if the variable is wrong."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_TIMEOUT_SECONDS:
        raise UserError(
            f"{TIMEOUT_VARIABLE}: {text!r} is not a number of seconds above 0 and up to {LONGEST_TIMEOUT_SECONDS:g}; "
            f"unset it for the default, {DEFAULT_TIMEOUT_SECONDS:g}"
        )
    return seconds
