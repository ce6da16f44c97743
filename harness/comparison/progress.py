"""Progress of a run, read from the end of its metrics.jsonl."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import UserError
from harness.runs.metrics import BenchmarkEvent, Event, TrainEvent, ValidationEvent, parse_event


@dataclass(frozen=True)
class Progress:
    """The newest numbers in a run's metrics.jsonl. A number that the run has not reported is None."""

    global_step: int
    tokens_seen: int
    seconds: float | None  # total of set-up, training, validation and checkpoints
    train_loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None
    mfu: float | None
    silent_seconds: float  # since the last line was written


def percent_done(tokens_seen: int, tokens_wanted: int) -> str:
    """Format the percentage of `tokens_wanted` that an unfinished run has seen, rounded down and at most 99 %."""
    return f"{min(99, 100 * tokens_seen // tokens_wanted)} %"


def describe_progress(progress: Progress | None, wanted: int | None, *, goes_on: bool = True) -> str:
    """Return the progress of a run as text for a terminal. `wanted` is the number of tokens of the whole run, or None
    if it is not known. If the run is still training (`goes_on`), the text includes the time left."""
    if progress is None:
        return "nothing reported yet"
    parts = [f"global step {progress.global_step:,}"]
    if wanted:
        parts.append(percent_done(progress.tokens_seen, wanted))
    if progress.train_loss is not None:
        parts.append(f"loss {progress.train_loss:.3f}")
    if goes_on and wanted and progress.tokens_per_second:
        seconds = max(0, wanted - progress.tokens_seen) / progress.tokens_per_second
        parts.append(f"{duration(seconds)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Format seconds in the largest unit that fits at least once: 90 -> "2 min"."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def read_progress(path: Path) -> Progress | None:
    """Read the newest numbers of a metrics.jsonl. Returns None if the file does not exist or no line in it is an event
    of this program. Raises UserError if the file cannot be read."""
    last: Event | None = None
    train: TrainEvent | None = None
    validation: ValidationEvent | None = None
    for event in last_training(path):
        last = last or event
        train = event if train is None and isinstance(event, TrainEvent) else train
        validation = event if validation is None and isinstance(event, ValidationEvent) else validation
        if train and validation:
            break
    if last is None:
        return None
    return Progress(
        global_step=last.global_step,
        tokens_seen=last.tokens_seen,
        seconds=last.seconds,
        train_loss=train.loss if train else None,
        validation_loss=validation.loss if validation else None,
        tokens_per_second=train.tokens_per_second if train else None,
        mfu=train.mfu if train else None,
        silent_seconds=max(0.0, time.time() - path.stat().st_mtime),
    )


def read_last_benchmarks(path: Path) -> list[BenchmarkEvent]:
    """Return the scores of the last evaluation of benchmarks while training. Returns an empty list if the last training
    in this metrics.jsonl evaluated none. Raises UserError if the file cannot be read."""
    found: list[BenchmarkEvent] = []
    for event in last_training(path, with_bytes=b'"benchmark"'):
        if found and event.global_step != found[0].global_step:
            break
        if isinstance(event, BenchmarkEvent):
            found.append(event)
    return found[::-1]


def last_training(path: Path, with_bytes: bytes = b"") -> Iterator[Event]:
    """Yield the events of the last training in a metrics.jsonl, the newest first. The file may begin with the events of
    earlier trainings. Reading backward, the first event with a later global step than the event after it belongs to an
    earlier training, and the iteration stops there. Yields nothing if the file does not exist, or if the bytes
    `with_bytes` occur nowhere in it. Skips lines that are not events, such as a line that a crash cut off. Raises
    UserError if the file cannot be read."""
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    following: int | None = None
    for line in reversed(content.split(b"\n") if with_bytes in content else []):
        event = parse_event(line)
        if event is None:
            continue
        if following is not None and event.global_step > following:
            return
        following = event.global_step
        yield event
