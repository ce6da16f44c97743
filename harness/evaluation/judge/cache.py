"""Every answer of a judge on disk, one JSON line each, so that none is paid for twice."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.common.errors import RunError, UserError
from harness.common.json_files import RecordedCount
from harness.evaluation.judge.prompts import Score

LINE_START = b'{"key":'  # of every line: a file with other lines is not a cache, and not written to


class Record(BaseModel):
    """One answer. `scores` are by the names in the prompt; an answer that was not valid has a `reason` instead.
    `prompt` is in whose words the judge was asked, if not ours.

    Tokens are None where the endpoint does not count them. Question and repeat, from 1, and the time, in seconds since
    1970, are for a reader of the file.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    key: str
    question: RecordedCount
    repeat: RecordedCount
    scores: dict[str, Score] | None = None
    prompt: str | None = None
    reason: str | None = None
    prompt_tokens: RecordedCount | None = None
    completion_tokens: RecordedCount | None = None
    time: float = Field(allow_inf_nan=False)


class JudgeCache:
    """An open cache file, which is this process's alone until it is closed. A context manager.

    The lock is on the file itself: filelock would leave a second file, and not see a judging by an earlier version.
    """

    def __init__(self, path: Path) -> None:
        """Make or read the file. Raises UserError if another process has it, or if it is another kind of file, and
        RunError if it cannot be read or made."""
        self.path = path
        self._thread_lock = threading.Lock()
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: not a file; give --cache another place")
        try:
            self._file = path.open("a+b", buffering=0)
            if not _lock(self._file.fileno()):
                self._file.close()
                raise UserError(f"{path}: another judging uses it; wait for that one, or give --cache FILE")
            content = path.read_bytes()
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}; --cache FILE names another place") from None
        self.records = list(_parse(path, content))
        # A line that a kill cut off stays as it is, and the next one begins a line of its own.
        self._on_fresh_line = content[-1:] in (b"", b"\n")

    def append(self, record: Record) -> None:
        """Write the record; it is on the disk when this returns. Raises RunError if the disk does not take it."""
        line = record.model_dump_json(exclude_none=True).encode() + b"\n"
        with self._thread_lock:
            if self._file.closed:  # by the end of a judging that no longer waits for this answer
                return
            left = line if self._on_fresh_line else b"\n" + line
            try:
                while left:
                    left = left[self._file.write(left) :]
                os.fsync(self._file.fileno())
            except OSError as error:
                self._on_fresh_line = False
                raise RunError(f"{self.path}: {error.strerror}; judging again goes on with what is there") from None
            self._on_fresh_line = True
            self.records.append(record)

    def __enter__(self) -> JudgeCache:
        return self

    def __exit__(self, *_: object) -> None:
        """Let others have the file. One to which nothing was written is gone again."""
        with self._thread_lock:  # no line is cut off
            if os.fstat(self._file.fileno()).st_size == 0:
                self.path.unlink(missing_ok=True)
            self._file.close()


def _lock(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed or the process ends. False if another process has or had it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return os.fstat(descriptor).st_nlink > 0  # 0: its last owner found it empty, and removed it in this moment


def _parse(path: Path, content: bytes) -> Iterator[Record]:
    """Yield the records of all whole lines. Raises UserError for a line that is neither a record nor a part of one."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line and not (line.startswith(LINE_START) or LINE_START.startswith(line)):
            raise UserError(f"{path}:{number}: not a judge's answer; give --cache another file")
        with suppress(ValidationError):  # cut off by a kill
            yield Record.model_validate_json(line)
