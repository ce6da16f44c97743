"""Charts of a run during training, drawn in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from harness.common.messages import tell
from harness.common.program import ROOT
from harness.runs.directory import RunDirectory

# In the training process, even in a thread, drawing would hold the interpreter's lock and keep a GPU waiting for its
# next kernels. Training has precedence over drawing, but at the lowest priority a busy machine would never finish the
# last chart.
WORKER = ["nice", "-n", "5", sys.executable, "-m", "harness.runs.chart"]


class ChartProcess:
    """Draw a run's chart in one process at a time. Every failure is only a warning, because a chart must not end a
    run."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._process: subprocess.Popen[str] | None = None
        self._is_stale = False  # `draw` was called while the process was drawing

    def draw(self) -> None:
        """Start to draw the chart from the metrics so far, and return at once. If an earlier chart is still being
        drawn, leave the newest metrics to a later call or `finish`."""
        self._is_stale = self._process is not None and self._process.poll() is None
        if self._is_stale:
            return
        self._close()
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            self._process = subprocess.Popen(
                [*WORKER, str(self._run.metrics), str(self._run.chart), self._run.path.name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C must reach only the training process
            )
        except (OSError, ValueError) as error:
            self._warn(f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error))

    def finish(self, seconds: float) -> None:
        """Wait until all calls of `draw` are carried out or have failed, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self._process is not None:
            try:
                self._process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
                self._process = None
                self._warn(f"not drawn in {seconds:g} s")
                return
            self._close()
            if self._is_stale:
                self.draw()

    def _close(self) -> None:
        """Wait for the process to end, and warn if it has failed."""
        if self._process is not None:
            _, printed = self._process.communicate()
            status, lines = self._process.returncode, printed.strip().splitlines()
            if status:
                killed = f"the process that draws it ended with status {status}"
                self._warn(lines[-1] if lines and status > 0 else killed)
            self._process = None

    def _warn(self, reason: str) -> None:
        tell(f"warning: {self._run.chart}: no new chart: {reason}")
