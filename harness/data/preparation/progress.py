"""Progress of reading text files: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from harness.data.preparation.encoding import Encoded
from harness.data.preparation.text_files import TextFile
from harness.data.preparation.token_stream import StreamSize

SECONDS_BETWEEN_LINES = 10.0
BAR_FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


class ReadingProgress:
    """Documents, tokens, tokens/s and time left. The bar counts bytes of the input files."""

    def __init__(self, files: Sequence[TextFile]) -> None:
        self._before = [0, *itertools.accumulate(file.size for file in files)]
        self._began = self._shown = time.monotonic()
        self._bar: tqdm | None = None
        self._first: tuple[int, int] | None = None  # bytes and tokens of an earlier process
        self._is_terminal = sys.stderr.isatty()

    def show(self, encoded: Encoded, size: StreamSize) -> None:
        """Tell of a batch; `size` counts all there is so far."""
        position = self._before[encoded.batch.file] + encoded.batch.position
        if self._first is None:
            self._first = (position, size.tokens)
        now = time.monotonic()
        done, tokens = position - self._first[0], size.tokens - self._first[1]
        speed = tokens / max(now - self._began, 1e-9)
        if self._is_terminal:
            if self._bar is None:
                total = self._before[-1]
                self._bar = tqdm(total=total, initial=position, bar_format=BAR_FORMAT, dynamic_ncols=True)
            self._bar.update(position - self._bar.n)
            self._bar.set_postfix_str(
                f"{_short(size.documents)} documents, {_short(size.tokens)} tokens, {_short(speed)} tokens/s"
            )
        elif now - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = now
            left = (now - self._began) * (self._before[-1] - position) / max(1, done)
            print(
                f"{position / max(1, self._before[-1]):4.0%}  {size.documents:,} documents  {size.tokens:,} tokens  "
                f"{speed:,.0f} tokens/s  {tqdm.format_interval(left)} left",
                flush=True,
            )

    def __enter__(self) -> ReadingProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _short(number: float) -> str:
    return tqdm.format_sizeof(number)
