"""The watchdog's threads exchange heartbeats between ranks. test_diagnosis.py tests how faults are found from them."""

from __future__ import annotations

import threading
import time

from harness.distributed.diagnosis import IDLE, Heartbeat
from harness.distributed.watchdog import Place, Watchdog


class DictStore:
    """Fake of a TCPStore for ranks in one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key].encode() for key in keys]


def test_heartbeats_travel_through_the_store() -> None:
    store, barrier = DictStore(), threading.Barrier(2)
    asked = threading.Event()
    watchdogs = [Watchdog(0, 0.5), Watchdog(1, 0.5, asked.is_set)]
    other = threading.Thread(target=watchdogs[1].start, args=(store, 2, barrier.wait))
    other.start()
    watchdogs[0].start(store, 2, barrier.wait)
    other.join()

    def heard() -> Heartbeat:
        return watchdogs[0].heartbeats.last[1].heartbeat

    try:
        with watchdogs[1].guard(Place(3, "step")):
            watchdogs[1].beat()
            deadline = time.monotonic() + 60
            while heard().progress != [Place(3, "step").order, 1]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert heard().place == "global step 3"
            assert heard().stalled is not None
        while heard().progress != [Place(3, "step").order, IDLE]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert heard().stalled is None
        assert not watchdogs[0].is_anyone_stopping()
        asked.set()
        while not watchdogs[0].is_anyone_stopping():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for watchdog in watchdogs:
            watchdog.stop()


def test_alone_there_is_nothing_to_watch() -> None:
    watchdog = Watchdog()
    with watchdog.guard(Place(0, "step")):
        watchdog.beat()
    watchdog.idle(Place(0, "step"))
    watchdog.stop()
