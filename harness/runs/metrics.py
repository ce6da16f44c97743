"""What is measured in a run: time by phase, speed, dollars, and the file it goes to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.common.errors import RunError
from harness.common.json_files import finite
from harness.runs.checkpoint_meta import CheckpointMeta

PHASES = ("setup", "training", "validation", "benchmarks", "checkpointing")


class MetricsFile:
    """metrics.jsonl: one JSON object a line, only ever appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: str, **values: Any) -> None:
        """Write one line; numbers that JSON cannot say (NaN, infinity) become null. Raises RunError if it cannot."""
        line = json.dumps({"event": event, **{key: finite(value) for key, value in values.items()}}, allow_nan=False)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{self.path}: cannot write metrics: {error.strerror}") from None

    def size(self) -> int:
        """Bytes written so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, size: int, make_aside: Callable[[], Path]) -> None:
        """Shorten the file to its first `size` bytes, keeping the rest, if any, as a file in a folder made for it.
        Raises RunError if the rest cannot be written there; the file is then as it was."""
        if self.size() > size:
            rest = make_aside() / self.path.name
            try:
                rest.write_bytes(self.path.read_bytes()[size:])
            except OSError as error:
                raise RunError(f"{rest}: cannot set later metrics aside: {error.strerror}") from None
            os.truncate(self.path, size)

    def rewind_to(self, meta: CheckpointMeta, make_aside: Callable[[], Path]) -> None:
        """Cut the file back to where the checkpoint with this meta.json was made; what came after is kept aside."""
        size = meta.metrics_bytes
        own = self.line_at(size) if meta.planned else None
        has_line = own is not None and (own.get("event"), own.get("global_step")) == ("checkpoint", meta.global_step)
        self.cut(self.end_of_line(size) if has_line else size, make_aside)
        if meta.planned and not has_line:  # the process ended between the checkpoint and its line
            place = {"global_step": meta.global_step, "tokens_seen": meta.tokens_seen}
            self.append(
                "checkpoint",
                **place,
                seconds=round(sum(meta.seconds.values()), 3),
                is_best=meta.is_best,
            )

    def line_at(self, start: int) -> dict[str, Any] | None:
        """The event whose line begins at byte `start`, if there is a whole one."""
        rest = self.path.read_bytes()[start:] if self.path.exists() else b""
        line, end, _ = rest.partition(b"\n")
        try:
            event = json.loads(line) if end else None
        except (ValueError, RecursionError):
            return None
        return event if isinstance(event, dict) else None

    def end_of_line(self, start: int) -> int:
        """The byte after the line that begins at `start`."""
        return start + self.path.read_bytes()[start:].index(b"\n") + 1


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The events of a metrics.jsonl; a last line that a crash cut off is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events
