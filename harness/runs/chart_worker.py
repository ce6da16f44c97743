"""The process that draws a run's chart: python -m harness.runs.chart_worker METRICS PICTURE TITLE."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Niceness of this process. Training has precedence, but at the lowest priority a busy machine would never finish the
# last chart.
LOWER_PRIORITY = 5


def main() -> None:
    """Draw the chart. If that fails, print the reason in one line and exit with status 1."""
    os.nice(LOWER_PRIORITY)
    metrics, picture, title = sys.argv[1:]
    try:
        from harness.runs.chart import draw_training_chart

        draw_training_chart(Path(metrics), Path(picture), title=title)
    except Exception as error:
        print(" ".join(f"{error}".split()) or type(error).__name__)
        sys.exit(1)


if __name__ == "__main__":
    main()
