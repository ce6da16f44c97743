"""The process that draws a run's chart: python -m harness.runs.chart_worker METRICS PICTURE TITLE.

Each line on standard input asks for a chart of the run so far; several that have come meanwhile are one. After each
drawing a line on standard output says how many were asked for by then, and what went wrong, if anything did. It ends
when standard input does, in the middle of a drawing too: whoever asked is gone.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

LOWER_PRIORITY = 5  # training has the cores first; with the lowest, a busy machine would never finish the last chart


class Requests:
    """Lines that have come on standard input, counted by a thread."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def listen(self) -> None:
        """Count until the input ends, which ends the process."""
        while text := os.read(0, 2**16):
            with self._changed:
                self._count += text.count(b"\n")
                self._changed.notify()
        os._exit(0)

    def more_than(self, done: int) -> int:
        """Wait until there are more than `done`: how many."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > done)
            return self._count


def main() -> None:
    os.nice(LOWER_PRIORITY)
    metrics, picture, title = sys.argv[1:]
    requests, done = Requests(), 0
    threading.Thread(target=requests.listen, daemon=True).start()
    while True:
        done = requests.more_than(done)
        print(done, draw(Path(metrics), Path(picture), title), flush=True)


def draw(metrics: Path, picture: Path, title: str) -> str:
    """Draw; why there is no chart, in one line, or nothing."""
    try:
        from harness.runs.chart import draw_training_chart

        draw_training_chart(metrics, picture, title=title)
    except Exception as error:
        return " ".join(f"{error}".split()) or type(error).__name__
    return ""


if __name__ == "__main__":
    main()
