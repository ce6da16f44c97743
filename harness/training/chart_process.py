"""The chart of a run that trains, drawn beside the training: half a second of Python code in the process itself would
keep a GPU waiting for its next kernels, also in a thread, which holds the interpreter's lock."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
import warnings
from pathlib import Path

from harness.runs.directory import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
WORKER = [sys.executable, "-m", "harness.runs.chart_worker"]


class ChartProcess:
    """One worker (harness/runs/chart_worker.py) for a run, started at the first chart; it ends with this process,
    however that ends. Whatever goes wrong is a warning: a picture never ends a run."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._worker: subprocess.Popen[bytes] | None = None
        self._asked = self._drawn = 0
        self._answers = b""

    def draw(self) -> None:
        """Have the chart of the run so far drawn, some time soon: returns at once. What is asked for while another is
        being drawn is drawn after it, once."""
        try:
            self._read_answers(0.0)
            worker = self._worker or self._start()
            assert worker.stdin is not None
            os.write(worker.stdin.fileno(), b"\n")
            self._asked += 1
        except (OSError, ValueError) as error:
            self._warn(getattr(error, "strerror", None) or str(error))
            self._end()

    def finish(self, seconds: float) -> None:
        """End the worker when all that was asked for is drawn, or has failed, or after so many seconds."""
        deadline = time.monotonic() + seconds
        while self._drawn < self._asked and (left := deadline - time.monotonic()) > 0:
            self._read_answers(left)
        if self._drawn < self._asked:
            self._warn(f"not drawn in {seconds:g} s")
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the worker in a session of its own: Ctrl-C is for the training, which ends the worker when it ends."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._asked, self._drawn, self._answers = 0, 0, b""
        self._worker = subprocess.Popen(
            [*WORKER, str(self._run.metrics), str(self._run.chart), self._run.path.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        return self._worker

    def _read_answers(self, seconds: float) -> None:
        """Take note of the answers that come within so many seconds, or of the first that comes."""
        if self._worker is None:
            return
        assert self._worker.stdout is not None
        descriptor = self._worker.stdout.fileno()
        poll = select.poll()  # select() knows no descriptors from 1,024 on
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(1000 * seconds):
            return
        text = os.read(descriptor, 2**16)
        *lines, self._answers = (self._answers + text).split(b"\n")
        for line in lines:
            count, _, failure = line.decode(errors="replace").partition(" ")
            if not count.isdigit():
                continue  # something that Python's start-up has printed
            self._drawn = int(count)
            if failure:
                self._warn(failure)
        if not text:
            if self._drawn < self._asked:
                self._warn("the process that draws has ended (killed?)")
            self._end()

    def _end(self) -> None:
        """The next chart is another worker's."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()  # closes the pipes
        self._worker = None
        self._drawn = self._asked

    def _warn(self, reason: str) -> None:
        warnings.warn(f"{self._run.chart}: no chart: {reason}", stacklevel=3)
