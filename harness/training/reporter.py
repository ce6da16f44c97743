"""What rank 0 shows while it works: a bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


class Console:
    """Progress over global steps, and the newest numbers."""

    def __init__(self, total: int, done: int, *, visible: bool) -> None:
        self.total = total
        self.visible = visible
        self._done = done
        self._bar: Any = None

    def start(self) -> None:
        """From here on there is a bar, if there is a terminal. What is said earlier stands on lines of its own."""
        if self.visible and sys.stderr is not None and sys.stderr.isatty():
            self._bar = tqdm(
                desc="steps done",
                total=self.total,
                initial=self._done,
                unit="step",
                dynamic_ncols=True,
                smoothing=0.05,
            )

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def show(self, step: int, values: dict[str, str]) -> None:
        """Show the newest numbers, e.g. {"loss": "3.720", "tps": "234,480"}."""
        if self._bar is not None:
            self._bar.set_postfix(values)
        elif self.visible:
            numbers = "  ".join(f"{name} {value}" for name, value in values.items())
            print(f"global step {step}/{self.total - 1}  {numbers}", flush=True)

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text)
        elif self.visible:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
