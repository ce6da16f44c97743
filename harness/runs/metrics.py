"""Events, the measurements of a run step by step, and the file that holds them. Written and read through one class for
each kind of event.
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

Number = Annotated[int | float, BeforeValidator(finite)]
# None where it is not finite, which JSON cannot say, or where an earlier version did not write it.
MaybeNumber = Annotated[int | float | None, BeforeValidator(finite)]


class Event(BaseModel):
    """One line of metrics.jsonl: where the run was, and after how many seconds in all.

    The order of the fields is that of the keys in the line. Lines of earlier versions may have fewer, and others.
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
    # Of a mixture of experts: tokens of an expert over those of an even load; least, most, and of each block's experts.
    expert_load_min: MaybeNumber = None
    expert_load_max: MaybeNumber = None
    expert_load: list[list[MaybeNumber]] | None = None


class ValidationEvent(Event):
    """A validation's mean loss."""

    event: str = "validation"
    loss: MaybeNumber = None


class CheckpointEvent(Event):
    """A checkpoint that train.json asked for."""

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
    """The event in a line; None if there is none in it."""
    try:
        values = json.loads(line)
        kind = KINDS.get(str(values.get("event")), Event) if isinstance(values, dict) else Event
        return kind.model_validate(values)
    except (ValueError, RecursionError):  # what does not parse, or is none of ours
        return None


class MetricsFile:
    """metrics.jsonl: one JSON object a line, only ever appended to.

    A line is the system's at once, and survives whatever happens to the process. The disk itself gets the lines when
    the writer of a checkpoint calls `make_durable`, before that checkpoint can be found: a run that continues cuts the
    file back to its checkpoint's length, so that it needs no later ones, and training does not wait for the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: Event) -> None:
        """Write one line. Raises RunError if it cannot."""
        line = json.dumps({"event": event.event, **event.model_dump(exclude_unset=True)}, allow_nan=False)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise self._failure(error) from None

    def make_durable(self) -> None:
        """Return when all lines so far are on the disk itself; from any thread. Raises RunError if that fails."""
        try:
            if self.path.exists():
                sync(self.path)
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> RunError:
        return RunError(f"{self.path}: cannot write metrics: {error.strerror}")

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
        own = self.event_at(size) if meta.planned else None
        has_line = isinstance(own, CheckpointEvent) and own.global_step == meta.global_step
        self.cut(self.end_of_line(size) if has_line else size, make_aside)
        if meta.planned and not has_line:  # the process ended between the checkpoint and its line
            self.append(
                CheckpointEvent(
                    global_step=meta.global_step,
                    tokens_seen=meta.tokens_seen,
                    seconds=round(sum(meta.seconds.values()), 3),
                    is_best=meta.is_best,
                )
            )

    def event_at(self, start: int) -> Event | None:
        """The event whose line begins at byte `start`, if there is a whole one."""
        rest = self.path.read_bytes()[start:] if self.path.exists() else b""
        line, end, _ = rest.partition(b"\n")
        return parse_event(line) if end else None

    def end_of_line(self, start: int) -> int:
        """The byte after the line that begins at `start`."""
        return start + self.path.read_bytes()[start:].index(b"\n") + 1


def read_metrics(path: Path) -> list[Event]:
    """The events of a metrics.jsonl; what is no event, such as a last line that a crash cut off, is left out."""
    events = (parse_event(line) for line in path.read_bytes().split(b"\n"))
    return [event for event in events if event is not None]
