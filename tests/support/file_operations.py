"""Faults at exact file operations, injected by the process itself: preludes of the fault tests call what is here.

Audit hooks see a file being opened, made, renamed, linked, cut and removed, but neither writes nor fsync, so those are
wrapped. safetensors writes from Rust, out of sight of both: its call counts as three operations.
"""

from __future__ import annotations

import builtins
import errno
import importlib
import io
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

AUDITED = {"os.mkdir", "os.rename", "os.symlink", "os.link", "os.remove", "os.rmdir", "os.chmod", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CALLS = {  # what a number counts operations of, by a short name
    "save": "checkpointing:Checkpointer._save",
    "background save": "harness.training.saving:AsyncWriter._run",
    "metrics": "harness.runs.metrics:MetricsFile.append",
    "end": "harness.training.reporter:Reporter.summary",
    "going back": "harness.runs.checkpoints:rewind_to",
    "cutting the metrics": "harness.runs.metrics:MetricsFile.rewind_to",
    "moving aside": "harness.runs.directory:RunDirectory.set_results_aside",
    "summary": "harness.runs.summary:replace_text",
    "lock": "harness.runs.directory:RunDirectory.lock",
}
WITHOUT_CHARTS = "from harness.training.chart_process import ChartProcess\nChartProcess.draw = lambda self: None\n"

# Does half of an operation, where that is possible.
Half = Callable[[], object]
Fault = Callable[[int, str, Half | None], None]


def prelude(call: str, number: int, fault: str, *values: object) -> str:
    """Python source that injects a fault into rank 0, during the call `number` (from 0) of CALLS[call].

    `fault` is a function of this module that makes one, and `values` are its arguments.
    """
    arguments = ", ".join(repr(str(value) if isinstance(value, Path) else value) for value in values)
    source = f"from tests.support import file_operations as f\nf.inject({call!r}, {number}, f.{fault}({arguments}))\n"
    return WITHOUT_CHARTS + source


def log(path: str) -> Fault:
    """No fault: each operation is a line of a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def act(number: int, name: str, half: Half | None) -> None:
        os.write(descriptor, f"{name}\n".encode())

    return act


def kill(at: int) -> Fault:
    """SIGKILL before an operation, or in the middle of it where it can be halved."""

    def act(number: int, name: str, half: Half | None) -> None:
        if number == at:
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def fail(at: int) -> Fault:
    """The operation fails as on a broken disk."""

    def act(number: int, name: str, half: Half | None) -> None:
        if number == at and not name.startswith("shutil."):  # those are announcements
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    return act


def fill(at: int, folder: str, room: int) -> Fault:
    """Somebody else takes all of a disk but `room` bytes before an operation; with -1 all its inodes instead."""

    def act(number: int, name: str, half: Half | None) -> None:
        if number == at:
            fill_disk(Path(folder), room)

    return act


def fill_disk(folder: Path, room: int) -> None:
    """Take all space of a small disk but `room` bytes, or all its inodes (-1). Plain system calls: none is counted."""
    with suppress(OSError):
        for index in range(10**6 if room < 0 else 0):
            os.mknod(folder / f"ballast-{index}")
    if room >= 0:
        descriptor = os.open(folder / "ballast", os.O_WRONLY | os.O_CREAT)
        with suppress(OSError):
            while True:
                os.write(descriptor, bytes(4096))
        os.ftruncate(descriptor, max(0, os.fstat(descriptor).st_size - room))
        os.close(descriptor)


def empty_disk(folder: Path) -> None:
    """Make room again."""
    for path in folder.glob("ballast*"):
        path.unlink()


def inject(call: str, number: int, fault: Fault) -> None:
    """Let `fault` act before each file operation of the call `number` (from 0) of CALLS[call], on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        sys.dont_write_bytecode = True  # of a module that the call is the first to import: no operation of its own
        operations = Operations(fault)
        operations.watch_calls(CALLS[call], number)
        operations.watch_files()


class Operations:
    """Numbers the file operations of one thread during one call."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.thread: int | None = None  # while the call is under way
        self.count = 0

    @property
    def counts(self) -> bool:
        return self.thread == threading.get_ident()

    def next(self, name: str, half: Half | None = None) -> None:
        """An operation is about to happen. The fault's own operations do not count."""
        if self.counts:
            thread, self.thread = self.thread, None
            self.count += 1
            self.fault(self.count - 1, name, half)
            self.thread = thread

    def watch_calls(self, target: str, number: int) -> None:
        module, _, path = target.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        original, calls = getattr(owner, name), iter(range(10**9))

        @wraps(original)
        def watched(*values: Any, **named: Any) -> Any:
            if next(calls) != number:
                return original(*values, **named)
            self.thread = threading.get_ident()
            try:
                return original(*values, **named)
            finally:
                self.thread = None

        setattr(owner, name, watched)

    def watch_files(self) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # here, because a save in the background may not
        sys.addaudithook(self._audit)
        fsync, opening = os.fsync, io.open

        def watched_fsync(descriptor: Any) -> None:
            self.next(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
            fsync(descriptor)

        def watched_open(file: Any, mode: str = "r", *values: Any, **named: Any) -> Any:
            if not self.counts or not set("wax") & set(mode):
                return opening(file, mode, *values, **named)
            buffer = io.BufferedWriter(CountedFile(self, file, mode.strip("bt")))
            return buffer if "b" in mode else io.TextIOWrapper(buffer, named.get("encoding"))

        os.fsync = watched_fsync  # type: ignore[assignment]
        io.open = builtins.open = watched_open
        import harness.model.weights

        harness.model.weights.save_file = self._watched_save_file(harness.model.weights.save_file)  # type: ignore[attr-defined]

    def _audit(self, event: str, values: tuple[Any, ...]) -> None:
        if not self.counts:
            return
        if event == "open":
            path, _, flags = values
            if flags & WRITING:
                self.next(f"open {_name(path)}")
        elif event in AUDITED or event.startswith("shutil."):
            self.next(f"{event} {_name(values[0])}")

    def _watched_save_file(self, original: Callable[..., None]) -> Callable[..., None]:
        def watched(tensors: Any, path: Path, **named: Any) -> None:
            def reserve() -> None:  # the kernel ends the process when Rust asks for the file's space
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                sys.dont_write_bytecode = True  # it would be cut short, too
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
                original(tensors, path, **named)

            def write_half() -> None:  # under the name that Rust's own would have in between
                original(tensors, path, **named)
                path.rename(path.with_name(".tmpA1b2C3"))
                os.truncate(path.with_name(".tmpA1b2C3"), path.with_name(".tmpA1b2C3").stat().st_size // 2)

            self.next(f"write {path.name}")
            self.next(f"reserve {path.name}", reserve)
            self.next(f"half of {path.name}", write_half)
            original(tensors, path, **named)

        return watched


class CountedFile(io.FileIO):
    """A file whose every write is an operation that can be halved."""

    def __init__(self, operations: Operations, file: Any, mode: str) -> None:
        super().__init__(file, mode)
        self.operations = operations
        self.label = f"write {_name(file)}"

    def write(self, data: Any) -> int:
        half = bytes(data[: len(data) // 2])
        self.operations.next(self.label, lambda: os.write(self.fileno(), half))
        return super().write(data)


def _name(path: object) -> str:
    return Path(os.fsdecode(path)).name if isinstance(path, str | bytes | os.PathLike) else str(path)
