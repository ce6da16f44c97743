"""The events of a run, which are its measurements at global steps, and metrics.jsonl, the file that holds them. Each
kind of event has one class, which writes and reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from harness.common.errors import RunError
from harness.common.files import sync
from harness.common.json_files import finite
from harness.runs.checkpoint_meta import CheckpointMeta

PHASES = ("setup", "training", "validation", "benchmarks", "checkpointing")

# None if the number is not finite, which JSON cannot express, or if an earlier version did not write it.
MaybeNumber = Annotated[int | float | None, BeforeValidator(finite)]


class Event(BaseModel):
    """One line of metrics.jsonl: a kind of event, with the global step, the tokens seen and the seconds spent in all
    phases up to this event.

    The order of the fields is that of the keys in the line. Lines of earlier versions may lack keys and may have
    others.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    event: str
    global_step: int
    tokens_seen: int = 0
    seconds: MaybeNumber = None


class TrainEvent(Event):
    """Training metrics of all ranks since the last report."""

    event: str = "train"
    loss: MaybeNumber = None
    loss_min: MaybeNumber = None
    loss_max: MaybeNumber = None
    gradient_norm: MaybeNumber = None
    skipped_steps: int = 0
    learning_rate: MaybeNumber = None
    tokens_per_second: MaybeNumber = None
    mfu: MaybeNumber = None
    # Only for a mixture of experts. The load of an expert is the number of its tokens divided by the number that it
    # would have if all experts had equally many. The fields are the smallest load, the largest load, and the loads of
    # each block's experts.
    expert_load_min: MaybeNumber = None
    expert_load_max: MaybeNumber = None
    expert_load: list[list[MaybeNumber]] | None = None


class ValidationEvent(Event):
    """Mean loss of a validation."""

    event: str = "validation"
    loss: MaybeNumber = None


class CheckpointEvent(Event):
    """A checkpoint that was due by train.json's checkpoint interval. A checkpoint saved because of a signal has no such
    event."""

    event: str = "checkpoint"
    is_best: bool = False


class BenchmarkEvent(Event):
    """One metric of a benchmark task or group."""

    event: str = "benchmark"
    task: str
    metric: str
    value: MaybeNumber = None
    stderr: MaybeNumber = None
    examples: int = 0


class SampleEvent(Event):
    """Text that the model generated from train.json's `sample_prompt`."""

    event: str = "sample"
    text: str = ""


KINDS: dict[str, type[Event]] = {str(kind.model_fields["event"].default): kind for kind in Event.__subclasses__()}


def parse_event(line: str | bytes) -> Event | None:
    """Return the event in a line of metrics.jsonl, or None if the line is not an event."""
    try:
        values = json.loads(line)
        kind = KINDS.get(str(values.get("event")), Event) if isinstance(values, dict) else Event
        return kind.model_validate(values)
    except (ValueError, RecursionError):  # no JSON, or no event of this program
        return None


class MetricsFile:
    """metrics.jsonl, with one JSON object per line. Training only appends to it.

    Each line is passed to the operating system at once, so that it survives the end of the process. `make_durable`
    flushes the lines to the disk. It is called before a checkpoint gets its final name. Lines after the last checkpoint
    need not be on the disk, because a run that resumes cuts the file back to the length recorded in its checkpoint.
    Training itself does not wait for the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: Event) -> None:
        """Append one line. Raises RunError if it cannot be written."""
        line = json.dumps({"event": event.event, **event.model_dump(exclude_unset=True)}, allow_nan=False)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise self._failure(error) from None

    def make_durable(self) -> None:
        """Flush all lines written so far to the disk. Any thread may call this. Raises RunError if it fails."""
        try:
            if self.path.exists():
                sync(self.path)
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> RunError:
        return RunError(f"{self.path}: cannot write metrics: {error.strerror}")

    def size(self) -> int:
        """Return the size of the file in bytes; 0 if there is no file."""
        return self.path.stat().st_size if self.path.exists() else 0

    def rewind_to(self, meta: CheckpointMeta, make_aside: Callable[[], Path]) -> None:
        """Truncate the file to the length that it had when the checkpoint with this meta.json was saved. Later lines,
        if any, are first written to a file in the folder that `make_aside` returns. Raises RunError if they cannot be
        written there; metrics.jsonl is unchanged in that case.

        If that checkpoint was due by train.json's checkpoint interval, its own line (a CheckpointEvent) is written only
        after the checkpoint. This line is kept, or appended if it is missing.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        size = meta.metrics_bytes
        line, end, _ = content[size:].partition(b"\n")
        own = parse_event(line) if end and meta.planned else None
        has_line = isinstance(own, CheckpointEvent) and own.global_step == meta.global_step
        if has_line:
            size += len(line + end)
        if len(content) > size:
            rest = make_aside() / self.path.name
            try:
                rest.write_bytes(content[size:])
            except OSError as error:
                raise RunError(f"{rest}: cannot set later metrics aside: {error.strerror}") from None
            os.truncate(self.path, size)
        if meta.planned and not has_line:  # the process ended after saving the checkpoint and before writing its line
            self.append(
                CheckpointEvent(
                    global_step=meta.global_step,
                    tokens_seen=meta.tokens_seen,
                    seconds=round(sum(meta.seconds.values()), 3),
                    is_best=meta.is_best,
                )
            )


def read_metrics(path: Path) -> list[Event]:
    """Return the events of a metrics.jsonl. Lines that are not an event, such as a last line that a crash cut off, are
    left out."""
    events = (parse_event(line) for line in path.read_bytes().split(b"\n"))
    return [event for event in events if event is not None]
