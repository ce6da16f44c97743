"""Noticing ranks that are stuck, silent or gone, and ending this process with a line that names them.

A gradient exchange waits for a rank that does not come, and cannot say which one that is. So every rank tells the
others, through the store at which they met, how far it is; threads of their own do that, and judge, whatever the main
thread waits for. Long work of one rank (a download, a save, a validation that goes on) is no fault: only time without
progress inside `guard` counts.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from harness.common import launcher
from harness.common.errors import LEAVING, PEER_LOST, TOLD, tell_soon
from harness.common.lock import ProcessName

POLL_SECONDS = 2.0
POLLS_IN_TIMEOUT = 5
# A rank that ends because of an error tells it itself, and its peers' main threads hear of it: let them speak first.
GONE_PATIENCE_SECONDS = 5.0
SILENT_EXIT_SECONDS = 2.0
IDLE = 2**53


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
    """Where a rank is: in the global step `step`, at the one of PLACES that is called `name`."""

    step: int
    name: str

    @property
    def order(self) -> int:
        """Grows from place to place, and is the same on all ranks."""
        return len(PLACES) * self.step + list(PLACES).index(self.name)

    def __str__(self) -> str:
        return PLACES[self.name].format(self.step)


class Store(Protocol):
    """Of torch.distributed's stores, what is used here."""

    def set(self, key: str, value: str) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


@dataclass(frozen=True)
class Heartbeat:
    """What a rank says of itself from time to time."""

    number: int  # counts the signs themselves
    process: ProcessName
    place: str
    progress: list[int]  # the rank with less of it is behind
    stalled: float | None  # seconds without progress; None outside `guard`
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
    """The last new sign of a rank, and when it came by this process's clock."""

    sign: Heartbeat
    at: float
    gone_since: float | None = None


class Watchdog:
    """This rank's eye on all of them. `beat` and `guard` are for the main thread, and cost next to nothing."""

    def __init__(self, rank: int, timeout_seconds: float) -> None:
        self.rank = rank
        self.timeout = timeout_seconds
        self.process = ProcessName.own()
        self._place, self._progress = "the start", [-1, 0]
        self._since: float | None = None
        self.is_stopping: Callable[[], bool] = lambda: False
        self._ended = threading.Event()
        self._leaving = False
        self._frozen_until = 0.0
        self._contact = time.monotonic()
        self._heard: list[LastHeartbeat] = []
        self._say: Callable[[Heartbeat], None] = lambda sign: None

    @contextmanager
    def guard(self, place: Place) -> Iterator[None]:
        """Inside, standing still for longer than the timeout is a fault."""
        self._place, self._progress = str(place), [place.order, 0]
        self._since = time.monotonic()
        try:
            yield
        finally:
            self.idle(place)

    def idle(self, place: Place) -> None:
        """This rank has nothing left to do at a place, and may take its time, or waits for the others."""
        self._since = None
        self._progress = [place.order, IDLE]

    def beat(self) -> None:
        """The main thread has got a part further inside the place it is at; the same parts on all ranks."""
        self._progress = [self._progress[0], self._progress[1] + 1]
        if self._since is not None:
            self._since = time.monotonic()

    def start(self, store: Store, size: int, meet: Any) -> None:
        """Begin to watch `size` ranks. `meet` returns when every rank has called it."""
        keys = [f"watch/{rank}" for rank in range(size)]
        self._say = lambda sign: store.set(keys[self.rank], sign.encode())
        self._say(self._sign(0))
        meet()
        now = time.monotonic()
        self._heard = [LastHeartbeat(Heartbeat.decode(text), now) for text in store.multi_get(keys)]
        # Apart, because a store behind a cut network answers a call neither with a value nor with an error.
        threading.Thread(target=self._talk, args=(store, keys), daemon=True, name="watch-talk").start()
        threading.Thread(target=self._look, daemon=True, name="watch-look").start()

    def is_anyone_stopping(self) -> bool:
        """Whether a signal has asked any rank to stop, as far as is known by now."""
        return any(heard.sign.stopping for heard in self._heard)

    def stop(self) -> None:
        """No more signs, and no more judging; what is under way may still end."""
        self._ended.set()

    def _sign(self, number: int) -> Heartbeat:
        since = self._since
        stalled = None if since is None else time.monotonic() - since
        return Heartbeat(number, self.process, self._place, self._progress, stalled, self.is_stopping(), self._leaving)

    @property
    def _pause(self) -> float:
        return min(POLL_SECONDS, self.timeout / POLLS_IN_TIMEOUT)

    def _talk(self, store: Store, keys: list[str]) -> None:
        number = 0
        # The store is in a torchrun's process: if that has been killed, the ranks end soon, and tell why themselves.
        while not self._ended.wait(self._pause) and not launcher.is_gone():
            number += 1
            try:
                self._say(self._sign(number))
                signs = [Heartbeat.decode(text) for text in store.multi_get(keys)]
            except RuntimeError:  # no contact: `_look` counts the seconds
                continue
            self._contact = now = time.monotonic()
            for heard, sign in zip(self._heard, signs, strict=True):
                if sign.number != heard.sign.number:
                    heard.sign, heard.at = sign, now

    def _look(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(self._pause) and not launcher.is_gone():
            now = time.monotonic()
            if now - looked > self.timeout / 2:  # it was this process that was frozen
                self._contact = now
                self._frozen_until = now + self.timeout / 2  # signs from before the freeze may still come
                if self._since is not None:
                    self._since = now
                for heard in self._heard:
                    heard.at = now
            looked = now
            if self._is_told() and not LEAVING.is_set():
                os._exit(1)
            fault = self._find_fault(now)
            if fault and not self._ended.is_set() and not LEAVING.is_set():
                self._leave(*fault)

    def _find_fault(self, now: float) -> tuple[str, list[int]] | None:
        """What is wrong, and the ranks it is about."""
        gone = self._gone(now)
        if gone:
            return f"{self._names(gone)} ended suddenly", gone
        patience = min(self.timeout, GONE_PATIENCE_SECONDS) if PEER_LOST.is_set() else self.timeout
        if now - self._contact > patience and self._heard[0].gone_since is None:
            return self._lost_contact(now - self._contact), [0]
        silent = [
            rank
            for rank, heard in enumerate(self._heard)
            # Without contact nobody can be heard; and of one that is gone more is known in a moment.
            if self._contact - heard.at > patience and heard.gone_since is None
        ]
        if silent:
            seconds = max(now - self._heard[rank].at for rank in silent)
            return (
                f"{self._names(silent)} gave no sign for {seconds:.0f} s: frozen, gone, or its machine is cut off",
                silent,
            )
        if now < self._frozen_until or any(now - heard.at > self.timeout / 2 for heard in self._heard):
            return None  # what that rank said last is old: soon it has given another sign, or is known to be frozen
        return self._find_stuck([heard.sign for heard in self._heard])

    def _is_told(self) -> bool:
        """Whether a rank of this machine leaves, and the user has read why; another machine's terminal is another's."""
        return any(heard.sign.leaving and heard.sign.process.is_neighbour_of(self.process) for heard in self._heard)

    def _lost_contact(self, seconds: float) -> str:
        process = self._heard[0].sign.process  # it holds the store, or the torchrun beside it does
        if process.is_neighbour_of(self.process):
            return f"{self._names([0])}, or its torchrun, gave no answer for {seconds:.0f} s: frozen"
        return f"no connection to rank 0's machine ({process.host}) for {seconds:.0f} s"

    def _gone(self, now: float) -> list[int]:
        """Ranks of this machine whose process has ended some seconds ago."""
        gone = []
        for rank, heard in enumerate(self._heard):
            process = heard.sign.process
            if process.is_neighbour_of(self.process) and process.is_gone():
                heard.gone_since = heard.gone_since or now
                if now - heard.gone_since >= GONE_PATIENCE_SECONDS:
                    gone.append(rank)
        return gone

    def _find_stuck(self, signs: Sequence[Heartbeat]) -> tuple[str, list[int]] | None:
        """The ranks that are behind all others, if they stand still where they should not."""
        earliest = min(sign.progress for sign in signs)
        behind = [rank for rank, sign in enumerate(signs) if sign.progress == earliest]
        stalled = [signs[rank].stalled for rank in behind]
        if None in stalled:
            return None
        # The last to come there: before it came, the others rightly waited for it.
        seconds = min(each or 0.0 for each in stalled)
        if seconds <= self.timeout:
            return None
        place = signs[behind[0]].place
        if len(behind) == len(signs):
            return f"no rank got beyond {place} for {seconds:.0f} s: a device or the network does not answer", []
        return f"{self._names(behind)} stuck for {seconds:.0f} s in {place}", behind

    def _names(self, ranks: Sequence[int]) -> str:
        return " and ".join(f"rank {rank} ({self._heard[rank].sign.process})" for rank in ranks)

    def _announce(self) -> None:
        with suppress(RuntimeError):  # the store may be what is gone
            self._say(self._sign(IDLE))

    def _leave(self, fault: str, about: Sequence[int]) -> None:
        """End this process; of each machine's ranks one says why."""
        near = [rank for rank, heard in enumerate(self._heard) if heard.sign.process.is_neighbour_of(self.process)]
        TOLD.set()
        speakers = [rank for rank in near if rank not in about] or near
        if self.rank == speakers[0]:
            tell_soon(f"{fault}; run the same command again to continue")
        else:
            time.sleep(SILENT_EXIT_SECONDS)  # torchrun ends all ranks once one has left: let the line be written first
        # Apart, because a store behind a cut network does not answer. Those who hear of it end without a word.
        self._leaving = True
        threading.Thread(target=self._announce, daemon=True).start()
        time.sleep(self._pause + 0.2)
        os._exit(1)


class NoWatchdog(Watchdog):
    """For a world of one process, which has nobody to wait for."""

    def __init__(self) -> None:
        super().__init__(0, float("inf"))
