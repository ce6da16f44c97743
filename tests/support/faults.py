"""Faults in the process under test. A prelude imports them in each rank, before the script runs.

    prelude = "from tests.support.faults import *; before(STEP, tell(15), rank=1, step=7)"

Functions of the program are named by where they are, as `module:Class.function`.
"""

from __future__ import annotations

import errno
import json
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGINT as SIGINT
from signal import SIGTERM as SIGTERM
from types import SimpleNamespace
from typing import Any

import torch

import harness.training.chart_process
from harness.distributed.watchdog import Place
from harness.training.chart_process import ChartProcess
from harness.training.step import OptimizerStep
from tests.support.file_operations import around

Action = Callable[[], Any]

START = "harness.distributed.world:World.join"
END = "harness.training.reporter:Reporter.summary"
CHECK = "harness.training.startup:check_same_everywhere"
WARM_UP = "harness.training.step:OptimizerStep.warm_up"
BETWEEN_STEPS = "harness.training.saving:Writer.check"
STEP = "harness.training.step:OptimizerStep.run"
FORWARD = "gpt:GPTModel.forward"
UPDATE = "harness.training.adamw:AdamW.update"
VALIDATION = "harness.training.evaluations:Evaluations.validation_loss"  # on all ranks
EVALUATION = "harness.training.evaluations:microbatch_losses"  # on ranks that evaluate
SAVE = "checkpointing:Checkpointer.save"  # on all ranks
WRITE = "harness.runs.checkpoints:_write_files"  # on rank 0
SYNC = "harness.common.files:sync"  # on rank 0, for each file of a checkpoint, and for its folders
METRICS = "harness.runs.metrics:MetricsFile.append"  # on rank 0


class Now:
    """Current step of this rank."""

    step = -1


# No charts are drawn, because drawing takes longer than everything else in these small runs.
_draw = ChartProcess.draw
ChartProcess.draw = lambda self: None  # type: ignore[method-assign]


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def before(where: str, action: Action, *, rank: int | None = None, step: int | None = None, call: int = 0) -> None:
    """Run `action` before the function `where`, on one rank or on all.

    With `call`, the action runs only at the call with this number (from 1) in this process, else at every call. With
    `step`, only calls during this global step count.
    """
    if rank not in (None, own_rank()):
        return
    calls = 0

    def acting(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        if step in (None, Now.step):
            calls += 1
            if call in (0, calls):
                action()
        return original(*arguments, **options)

    around(where, acting)


def in_gradients(change: Callable[[torch.Tensor], torch.Tensor | None], *, rank: int, steps: range) -> None:
    """Replace the gradient of one parameter by `change(gradient)` at these steps, on one rank, before the ranks
    exchange gradients. If `change` returns None, the gradient is unchanged."""

    def hook(gradient: torch.Tensor) -> torch.Tensor | None:
        return change(gradient) if Now.step in steps else None

    def building(original: Callable[..., None], self: OptimizerStep, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        if rank == own_rank():
            list(self.model.parameters())[-1].register_hook(hook)

    around("harness.training.step:OptimizerStep.__init__", building)


def after_first_evaluated(action: Action, *, step: int) -> None:
    """Run `action` in the validation of a global step, after the first microbatch."""

    def until_stopped(original: Callable[..., Any], self: Any, indexes: range) -> Iterator[int]:
        for count, index in enumerate(original(self, indexes)):
            if count == 1 and Now.step == step:
                action()
            yield index

    around("harness.distributed.signals:SharedWork.until_stopped", until_stopped)


def drift_before(step: int, rank: int) -> None:
    """Change one weight of one rank a little, before a step."""

    def stepping(original: Callable[..., Any], self: OptimizerStep, *arguments: Any) -> Any:
        if (Now.step, own_rank()) == (step, rank):
            with torch.no_grad():
                next(self.model.parameters())[0, 0] += 1e-3
        return original(self, *arguments)

    around(STEP, stepping)


# Actions


def tell(number: int) -> Action:
    """Return an action that sends a signal to this process."""
    return lambda: os.kill(os.getpid(), number)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(seconds: float) -> Action:
    """Return an action that kills this process some seconds later, whatever it does then."""
    return lambda: threading.Timer(seconds, kill).start()


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise RuntimeError("an injected failure")


def spin() -> None:
    while True:
        pass


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def in_turn(*actions: Action) -> Action:
    """Return an action that runs several actions, one after the other."""
    return lambda: [action() for action in actions]


def pause(seconds: float) -> Action:
    return lambda: time.sleep(seconds)


def until(path: str) -> Action:
    """Return an action that waits until a file exists."""

    def waiting() -> None:
        while not Path(path).exists():
            time.sleep(0.01)

    return waiting


def note(path: str, action: Action = lambda: None) -> Action:
    """Return an action that appends the time to a file and then runs `action`."""

    def noting() -> None:
        with Path(path).open("a") as file:
            file.write(f"{time.time()}\n")
        action()

    return noting


def slow_charts(seconds: float) -> None:
    """Turn charts on, which this module turns off. The process that draws them only sleeps for `seconds` at each
    chart."""
    slow = f"chart.draw_training_chart = lambda *_, **__: time.sleep({seconds})"
    source = f"import time, harness.runs.chart as chart\n{slow}\nchart.main()"
    harness.training.chart_process.WORKER[:] = [sys.executable, "-c", source]
    ChartProcess.draw = _draw  # type: ignore[method-assign]


# Records


def record_windows(folder: str) -> None:
    """Record in a file of `folder` the token windows of each step that this rank completes. Each line has the position
    of a window's first token, and the window's number of tokens."""
    handed: list[tuple[int, int]] = []
    path = Path(folder) / f"{os.getpid()}"

    def reading(original: Callable[..., Any], self: Any, start: int, count: int) -> Any:
        handed.append((start, count - 1))  # the last token is only a target
        return original(self, start, count)

    def handing_out(original: Callable[..., Any], *arguments: Any) -> Any:
        handed.clear()
        return original(*arguments)

    def stepping(original: Callable[..., Any], *arguments: Any) -> Any:
        result = original(*arguments)
        with path.open("a") as file:
            file.writelines(f"{start} {count}\n" for start, count in handed)
        return result

    around("harness.data.dataset:TokenFile.read", reading)
    around("harness.data.loader:TokenLoader.microbatches", handing_out)
    around(STEP, stepping)


def record_skips(folder: str) -> None:
    """Record for each step of this rank whether the step was skipped."""
    skips: list[bool] = []

    def stepping(original: Callable[..., Any], *arguments: Any) -> Any:
        result = original(*arguments)
        skips.append(bool(result.skipped))
        (Path(folder) / str(os.getpid())).write_text(json.dumps(skips))
        return result

    around(STEP, stepping)


def record_seconds(where: str, path: str, *, rank: int) -> None:
    """Record the seconds that each call of a function takes, on one rank."""

    def timing(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = original(*arguments, **options)
        with Path(path).open("a") as file:
            file.write(f"{time.perf_counter() - began}\n")
        return result

    if rank == own_rank():
        around(where, timing)


def lively_scaler() -> None:
    """Use a gradient scaler whose state changes within a few steps, by growth and by an overflow at step 4."""

    def scaler(original: Callable[..., Any], precision: Any) -> torch.amp.GradScaler:
        usual = original(precision)
        return torch.amp.GradScaler(
            precision.device_type, init_scale=1024.0, growth_interval=3, enabled=usual.is_enabled()
        )

    around("harness.model.precision:Precision.scaler", scaler)
    in_gradients(lambda gradient: gradient * torch.inf, rank=0, steps=range(4, 5))


def _guarding(original: Callable[..., Any], self: Any, place: Place) -> Any:
    Now.step = place.step
    return original(self, place)


around("harness.distributed.watchdog:Watchdog.guard", _guarding)


def record_handler(folder: str) -> None:
    """Record how often this rank's signal handler runs, and which functions it calls."""
    known: dict[str, Any] = {"runs": 0, "called": []}
    profiled = False
    place = "harness.distributed.signals:StopRequest._note"

    def noting(original: Callable[..., Any], *arguments: Any) -> None:
        nonlocal profiled

        def profile(frame: Any, event: str, argument: Any) -> None:
            # The next signal may interrupt the handler, and then the handler and its wrapper here run again. Neither is
            # a call that the handler makes.
            is_handler = event == "call" and frame.f_code in handler
            if event in {"call", "c_call"} and not is_handler and argument is not sys.setprofile:
                known["called"].append(f"{frame.f_code.co_name} {argument}")

        known["runs"] += 1
        # A signal may arrive within sys.setprofile (audit hooks run there), where Python refuses another call of it.
        first, profiled = not profiled, True
        if first:
            sys.setprofile(profile)
        try:
            original(*arguments)
        finally:
            if first:
                sys.setprofile(None)
                profiled = False

    handler = {pkgutil.resolve_name(place).__code__, noting.__code__}
    around(place, noting)
    handler.add(pkgutil.resolve_name(place).__code__)
    path = Path(folder) / str(os.getpid())
    before("harness.training.reporter:Console.close", lambda: path.write_text(json.dumps(known)))


def signal_storm(number: int, count: int) -> None:
    """Start a thread that sends many signals to this process, one each millisecond."""

    def send() -> None:
        for _ in range(count):
            os.kill(os.getpid(), number)
            time.sleep(0.001)

    threading.Thread(target=send).start()


def two_hours_later() -> None:
    """Let the clocks by which this process knows its ceilings and records its seconds jump ahead by two hours."""
    from harness.distributed import signals
    from harness.training import clock

    vars(signals)["time"] = SimpleNamespace(monotonic=lambda: time.monotonic() + 7200)
    vars(clock)["time"] = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 7200)


def in_life(life: int, path: str, action: Action) -> Action:
    """Return an action that runs `action` in one life of a job that is restarted. Lives are counted from 1, in the file
    `path`."""

    def acting() -> None:
        with Path(path).open("a+") as file:
            file.seek(0)
            lived = len(file.read().splitlines()) + 1
            if lived == life:
                file.write("died\n")
                file.flush()
                action()

    return acting
