"""The events of a run, and metrics.jsonl, the file that holds them. An event is a report, a validation, a benchmark, a
checkpoint or a sample at a global step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from harness.common.errors import EXIT, RunError, UserError, os_errors_as
from harness.common.files import refuse_special, sync
from harness.common.json_files import finite
from harness.common.messages import tell
from harness.runs.checkpoint_meta import CheckpointMeta

PHASES = ("setup", "training", "validation", "benchmarks", "checkpointing")

# None stands for a number that is not finite (JSON cannot express it), that is not known (as the MFU on an unknown
# device), or that an earlier version did not write.
MaybeNumber = Annotated[int | float | None, BeforeValidator(finite)]


class Event(BaseModel):
    """One event, which is one line of metrics.jsonl. Lines of earlier versions may lack keys and may have others."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    event: str  # kind of event
    global_step: int
    tokens_seen: int = 0
    seconds: MaybeNumber = None  # spent in all phases up to this event
    dollars: MaybeNumber = None  # likewise; not written without a price


def time_and_cost(seconds: Mapping[str, float], dollars: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the fields `seconds` and `dollars` of an event: the sums over all phases. Without a price, `dollars` is
    left out."""
    fields = {"seconds": round(sum(seconds.values()), 3)}
    return {**fields, "dollars": round(sum(dollars.values()), 6)} if dollars else fields


class TrainEvent(Event):
    """Report: training metrics of all ranks since the previous report."""

    event: str = "train"
    loss: MaybeNumber = None  # mean over microbatches
    epochs: dict[str, float] | None = None  # see `epochs_of`
    loss_min: MaybeNumber = None
    loss_max: MaybeNumber = None
    gradient_norm: MaybeNumber = None  # the largest since the previous report
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
    by_source: dict[str, MaybeNumber] | None = None  # of a mixture: the loss on each dataset, by its name


class CheckpointEvent(Event):
    """A planned checkpoint: one at an interval of train.json or after the last step. A checkpoint at an early stop has
    no event."""

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
    """The `sample_prompt` of train.json, continued by the model."""

    event: str = "sample"
    text: str = ""


KINDS: dict[str, type[Event]] = {str(kind.model_fields["event"].default): kind for kind in Event.__subclasses__()}


def parse_event(line: str | bytes) -> Event | None:
    """Return the event in a line of metrics.jsonl, or None if the line is not an event. A kind of event that this
    version does not know is returned as a plain Event."""
    try:
        values = json.loads(line)
        kind = KINDS.get(str(values.get("event")), Event) if isinstance(values, dict) else Event
        return kind.model_validate(values)
    except (ValueError, RecursionError):  # not JSON, or not an event of this program
        return None


class MetricsFile:
    """The file metrics.jsonl, with one JSON object per line. Appended lines survive a killed process. Before a
    checkpoint gets its final name, `make_durable` must be called."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: Event) -> None:
        """Append an event as one line, with the fields that have been set. Raises RunError if the line cannot be
        written."""
        line = json.dumps({"event": event.event, **event.model_dump(exclude_unset=True)}, allow_nan=False)
        with self._writing(), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def make_durable(self) -> None:
        """Flush all lines written so far to the disk. Any thread may call this. Raises RunError if flushing fails."""
        with self._writing():
            if self.path.exists():
                sync(self.path)

    def _writing(self) -> AbstractContextManager[None]:
        remedy = f"; fix the cause and {EXIT.again} to continue"
        return os_errors_as(RunError, f"{self.path}: cannot write metrics", remedy)

    def size(self) -> int:
        """Return the size of the file in bytes; 0 if there is no file."""
        return self.path.stat().st_size if self.path.exists() else 0

    def rewind_to(self, meta: CheckpointMeta, make_aside: Callable[[], Path]) -> None:
        """Truncate the file to its length when the checkpoint with this meta.json was saved. Later lines are moved to a
        file in the folder that `make_aside` returns. Without later lines, `make_aside` is not called.

        - A planned checkpoint's own line (a CheckpointEvent) is kept, or appended if missing.
        - If no line ends at that length, whole lines up to the checkpoint's step are kept, with a warning.

        Raises RunError if a file cannot be written, and OSError if metrics.jsonl cannot be read.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        size = meta.metrics_bytes
        if size and content[size - 1 : size] != b"\n":
            size = _end_of_earlier_lines(content, meta)
            tell(
                f"warning: {self.path}: lines from before the checkpoint of step {meta.global_step} are missing "
                "or were edited; the run continues with the remaining lines"
            )
        line, end, _ = content[size:].partition(b"\n")
        has_line = bool(end) and meta.planned and _is_line_of(line, meta)
        if has_line:
            size += len(line + end)
        if len(content) > size:
            rest = make_aside() / self.path.name
            remedy = "; fix the cause and run the command again"
            with os_errors_as(RunError, f"{rest}: cannot set later metrics aside", remedy):
                rest.write_bytes(content[size:])
                for path in (rest, *rest.parents[:2], self.path.parent):  # the folder and its parent may be new
                    sync(path)
            with self._writing():
                os.truncate(self.path, size)
        if meta.planned and not has_line:  # the process ended after saving the checkpoint and before writing its line
            self.append(
                CheckpointEvent(
                    global_step=meta.global_step,
                    tokens_seen=meta.tokens_seen,
                    **time_and_cost(meta.seconds, meta.costs),
                    is_best=meta.is_best,
                )
            )


def _is_line_of(line: bytes, meta: CheckpointMeta) -> bool:
    """Return True if the line is the CheckpointEvent of the checkpoint that `meta` describes."""
    event = parse_event(line)
    return isinstance(event, CheckpointEvent) and event.global_step == meta.global_step


def _end_of_earlier_lines(content: bytes, meta: CheckpointMeta) -> int:
    """Return the length of a metrics.jsonl up to the end of its last event before the checkpoint, or 0 if there is
    none."""
    end = content.rfind(b"\n") + 1
    while end:
        start = content.rfind(b"\n", 0, end - 1) + 1
        event = parse_event(content[start:end])
        if event and event.global_step <= meta.global_step and not _is_line_of(content[start:end], meta):
            break
        end = start
    return end


def read_metrics(path: Path) -> list[Event]:
    """Return the events of a metrics.jsonl. A line that is not an event is left out. Raises OSError if the file cannot
    be read."""
    events = (parse_event(line) for line in path.read_bytes().split(b"\n"))
    return [event for event in events if event is not None]


@dataclass(frozen=True)
class RunProgress:
    """The newest events in a run's metrics.jsonl."""

    last: Event  # of any kind
    train: TrainEvent  # without a loss if there was no report
    validation: ValidationEvent  # likewise
    silent_seconds: float  # since the file was last changed


def percent_done(tokens_seen: int, tokens_wanted: int) -> str:
    """Format the percentage of `tokens_wanted` that an unfinished run has seen, rounded down and at most 99: "42 %"."""
    return f"{min(99, 100 * tokens_seen // tokens_wanted)} %"


def describe_progress(progress: RunProgress | None, wanted: int | None, *, goes_on: bool = True) -> str:
    """Return the progress of a run as text for a terminal.

    - `progress`: None if the run has reported nothing.
    - `wanted`: tokens of the whole run; None: not known.
    - `goes_on`: give the time left, too.
    """
    if progress is None:
        return "nothing reported yet"
    seen, train = progress.last.tokens_seen, progress.train
    parts = [f"global step {progress.last.global_step:,}"]
    if wanted:
        parts.append(percent_done(seen, wanted))
    if train.loss is not None:
        parts.append(f"loss {train.loss:.3f}")
    if goes_on and wanted and train.tokens_per_second:
        seconds = max(0, wanted - seen) / train.tokens_per_second
        parts.append(f"{rough_duration(seconds)} left")
    return ", ".join(parts)


def rough_duration(seconds: float) -> str:
    """Format seconds as a rounded number of days, hours, minutes or seconds: 90 -> "2 min", 3590 -> "1 h"."""
    for size, unit, most in ((1, "s", 60), (60, "min", 60), (3600, "h", 24)):
        if round(seconds / size) < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def read_progress(path: Path) -> RunProgress | None:
    """Return the newest events in a metrics.jsonl, or None if it has no event or does not exist. Raises UserError if
    it cannot be read."""
    last: Event | None = None
    train: TrainEvent | None = None
    validation: ValidationEvent | None = None
    for event in newest_first(path):
        last = last or event
        train = event if train is None and isinstance(event, TrainEvent) else train
        validation = event if validation is None and isinstance(event, ValidationEvent) else validation
        if train and validation:
            break
    if last is None:
        return None
    train, validation = train or TrainEvent(global_step=0), validation or ValidationEvent(global_step=0)
    return RunProgress(last, train, validation, silent_seconds=max(0.0, time.time() - path.stat().st_mtime))


def read_last_benchmarks(path: Path) -> list[BenchmarkEvent]:
    """Return the scores of the last evaluation of benchmarks in a metrics.jsonl. The list is empty if there is none, or
    no file. Raises UserError if the file cannot be read."""
    found: list[BenchmarkEvent] = []
    for event in newest_first(path, with_bytes=b'"benchmark"'):
        if found and event.global_step != found[0].global_step:
            break
        if isinstance(event, BenchmarkEvent):
            found.append(event)
    return found[::-1]


def newest_first(path: Path, with_bytes: bytes = b"") -> Iterator[Event]:
    """Yield the events of a metrics.jsonl, the newest first. Yields nothing if the file does not exist or does not
    contain the bytes `with_bytes`. Raises UserError if the file cannot be read."""
    with os_errors_as(UserError, f"{path}: cannot be read"):
        refuse_special(path)
        content = path.read_bytes() if path.exists() else b""
    events = map(parse_event, reversed(content.split(b"\n") if with_bytes in content else []))
    yield from (event for event in events if event is not None)
