"""The progress that a rank reports while its device is behind the main thread. The device's events are simulated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.distributed.diagnosis import IDLE
from harness.distributed.watchdog import Progress, Standing, device_progress
from tests.support.launch import Workshop


class Device:
    """Simulated device. `recorded` counts its events. A test sets `reached`, the number of events that the device has
    completed."""

    def __init__(self) -> None:
        self.recorded = self.reached = 0

    def record(self) -> Callable[[], bool]:
        self.recorded += 1
        number = self.recorded
        return lambda: self.reached >= number


def test_a_milestone_counts_when_the_device_is_there() -> None:
    device = Device()
    found = Progress(device.record)
    assert found.standing().stalled is None
    found.reach("a", [1, 0], is_guarded=True)
    found.reach("a", [1, 1], is_guarded=True)
    found.reach("a", [1, IDLE], is_guarded=False)
    found.reach("b", [2, 0], is_guarded=True)
    assert (found.standing().place, found.standing().progress) == ("a", [-1, 0])
    device.reached = 2
    assert (found.standing().place, found.standing().progress) == ("a", [1, 1])
    device.reached = 3
    standing = found.standing()
    assert (standing.place, standing.progress) == ("b", [1, IDLE])
    assert standing.stalled is not None  # the main thread is idle, but the device still has work
    device.reached = 4
    assert found.standing().progress == [2, 0]
    found.reach("b", [2, IDLE], is_guarded=False)
    device.reached = 5
    assert found.standing().stalled is None
    on_cpu = device_progress(torch.device("cpu"))  # there a milestone counts at once
    on_cpu.reach("a", [1, 0], is_guarded=True)
    assert on_cpu.standing().progress == [1, 0]
    assert on_cpu.standing().stalled is not None
    on_cpu.reach("a", [1, IDLE], is_guarded=False)
    assert on_cpu.standing() == Standing("a", [1, IDLE], None)


def test_time_without_work_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a stall starts when work begins, so that a rank that was idle for an hour is not stuck at once. It
    starts anew after a freeze."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = Progress(Device().record)
    now[0] = 3600.0
    found.reach("a", [1, 0], is_guarded=True)
    now[0] = 3607.0
    assert found.standing().stalled == 7
    found.forgive()
    assert found.standing().stalled == 0


class Event:
    """Fake of torch.cuda.Event on a device that never completes it. With `failure` set, the device has failed."""

    failure: Exception | None = None

    def __init__(self, *, enable_timing: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def query(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return False


def test_on_cuda_events_are_asked_in_the_ranks_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that queries events selects the rank's own device first. By default a new thread uses the first
    device, and takes memory on it, although it belongs to another rank."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    device = torch.device("cuda", 3)
    found = device_progress(device)
    found.reach("a", [1, 0], is_guarded=True)
    asking = threading.Thread(target=found.standing)
    asking.start()
    asking.join()
    assert current == [device]
    monkeypatch.setattr(Event, "failure", RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert found.standing().progress == [-1, 0]


# Gives both ranks simulated events like CUDA's. In step 4 rank 1's device completes no further events in its own work,
# and rank 0's device none after it waits for rank 1's gradients. The report of step 6 waits for the devices.
HANGING_DEVICE = """
import time
from tests.support.faults import *
from harness.distributed import watchdog, world
from harness.training.loss_meter import LossMeter
recorded = 0
def record(device):
    global recorded
    recorded += Now.step == 4
    return Mark(Now.step, recorded)
class Mark:
    def __init__(self, step, number):
        self.step, self.number = step, number
    def __call__(self):
        return self.step < 4 or (self.step == 4 and self.number <= (2 if own_rank() == 1 else 4))
    def __sub__(self, earlier):
        return 0.0
watchdog.SILENT_EXIT_SECONDS = 0.5
world.device_progress = lambda device: watchdog.Progress(lambda: record(device))
before("harness.training.loss_meter:LossMeter.synchronize", pause(1000), step=6)
"""


def test_two_ranks_one_of_which_has_a_device_that_hangs(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, {"COLLECTIVE_TIMEOUT_SECONDS": "2"})
    shop.add_dataset()
    shop.add_run(report_interval=6, validation_interval=None, validation_batches=None, checkpoint_interval=20)
    result = shop.train(prelude=HANGING_DEVICE, expect=1)
    (line,) = result.error_lines
    assert line.startswith("error: rank 1 ("), line
    assert "in global step 4" in line
