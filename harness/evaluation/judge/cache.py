"""Cache file for the answers of a judge, one JSON object per line, so that no answer is paid for twice."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.common.errors import RunError, UserError, os_errors_as
from harness.common.json_files import RecordedCount
from harness.evaluation.judge.prompts import Score

LINE_START = b'{"key":'  # every line of a cache begins with this; a file with other lines is not written to


class Record(BaseModel):
    """One answer of the judge to a prompt, valid or not."""

    model_config = ConfigDict(frozen=True, strict=True)

    key: str  # SHA-256 of all that the answer depends on
    question: RecordedCount  # from 1; `question`, `repeat` and `time` are only for people who read the file
    repeat: RecordedCount  # from 1
    scores: dict[str, Score] | None = None  # by the names of the models' answers in the prompt; None: not valid
    prompt: str | None = None  # wording of the prompt: "book", "notebook", or None for this program's own
    reason: str | None = None  # why the judge's answer is not valid
    prompt_tokens: RecordedCount | None = None  # None, like the next, if the endpoint does not count tokens
    completion_tokens: RecordedCount | None = None
    time: float = Field(allow_inf_nan=False)  # seconds since 1970


class JudgeCache:
    """Cache file of a judge's answers. If the file system has locks, the file is locked until the `with` block ends.
    `records` has all answers, valid or not, of this file and of `others`."""

    def __init__(self, path: Path, *others: Path) -> None:
        """Create or read the file `path`, and lock it. Also read each of `others` that exists. Raises UserError if
        another process uses `path` or if a file is no cache file. Raises RunError or OSError if a file cannot be
        opened or read."""
        self.path = path
        self._thread_lock = threading.Lock()
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: not a file; name a file with --cache")
        with os_errors_as(RunError, str(path), "; name another file with --cache"):
            self._file = path.open("a+b", buffering=0)
            # The file itself is locked: filelock would leave a second file, and would not exclude an earlier version
            # of this program.
            if not _lock(self._file.fileno()):
                self._file.close()
                raise UserError(
                    f"{path}: another process is using it; wait until that one ends, or name another file with --cache"
                )
            content = path.read_bytes()
        contents = {other: other.read_bytes() for other in others if other.is_file()} | {path: content}
        self.records = [record for file, lines in contents.items() for record in _parse(file, lines)]
        # If a kill has cut off the last line, it is left unchanged, and the next record begins a new line.
        self._on_fresh_line = content[-1:] in (b"", b"\n")

    def append(self, record: Record) -> None:
        """Append a record and flush it to the disk, or do nothing if the file is closed. Any thread may call this.
        Raises RunError if the record cannot be written."""
        line = record.model_dump_json(exclude_none=True).encode() + b"\n"
        with self._thread_lock:
            if self._file.closed:  # the judging has ended without waiting for this answer
                return
            left = line if self._on_fresh_line else b"\n" + line
            self._on_fresh_line = False  # until the line is whole
            remedy = "; it has the answers so far; the same command continues from them"
            with os_errors_as(RunError, str(self.path), remedy):
                while left:
                    left = left[self._file.write(left) :]
                os.fsync(self._file.fileno())
            self._on_fresh_line = True
            self.records.append(record)

    def __enter__(self) -> JudgeCache:
        return self

    def __exit__(self, *_: object) -> None:
        """Close and unlock the file, and delete it if it is empty."""
        with self._thread_lock:  # wait for a record that is being written
            if os.fstat(self._file.fileno()).st_size == 0:
                self.path.unlink(missing_ok=True)
            self._file.close()


def _lock(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed, if the file system has locks. Return False if another process has
    locked or just deleted the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return os.fstat(descriptor).st_nlink > 0  # 0: another process found the file empty and has just deleted it


def _parse(path: Path, content: bytes) -> Iterator[Record]:
    """Yield the records of all valid lines. Raises UserError for a line that does not begin like a record."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line and not (line.startswith(LINE_START) or LINE_START.startswith(line)):
            raise UserError(f"{path}:{number}: not a judge's answer; give --cache another file")
        with suppress(ValidationError):  # the line was cut off or damaged
            yield Record.model_validate_json(line)
