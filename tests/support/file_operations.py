"""Faults at exact file operations, which preludes of the fault tests inject into the process under test.

Audit hooks see that a file is opened, created, renamed, linked, truncated or removed. They see neither writes nor
fsync, so those functions are wrapped. Hooks and wrapped functions do not see what safetensors writes from Rust, so a
call of safetensors counts as three operations.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import pkgutil
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

AUDITED = {"os.mkdir", "os.rename", "os.symlink", "os.link", "os.remove", "os.rmdir", "os.chmod", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CALLS = {  # the calls in which operations are numbered, by a short name
    "save": "checkpointing:Checkpointer.save",
    "background save": "harness.training.saving:Writer._run",
    "metrics": "harness.runs.metrics:MetricsFile.append",
    "end": "harness.training.reporter:Reporter.summary",
    "going back": "harness.runs.checkpoints:rewind_to",
    "cutting the metrics": "harness.runs.metrics:MetricsFile.rewind_to",
    "moving aside": "harness.runs.directory:RunDirectory.set_results_aside",
    "summary": "harness.runs.summary:replace_text",
}

# Performs half of an operation. Operations that cannot be halved have None in its place.
Half = Callable[[], object]
Fault = Callable[[int, str, Half | None], None]


def prelude(call: str, number: int, fault: str, *values: object) -> str:
    """Return Python source that injects a fault into rank 0, during the call `number` (from 0) of CALLS[call].

    `fault` is the name of a function of this module that returns a Fault, and `values` are its arguments.
    """
    arguments = ", ".join(repr(str(value) if isinstance(value, Path) else value) for value in values)
    return f"from tests.support import file_operations as f\nf.inject({call!r}, {number}, f.{fault}({arguments}))\n"


def log(path: str) -> Fault:
    """Return a fault that does no harm, and writes the name of each operation to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def act(number: int, name: str, half: Half | None) -> None:
        os.write(descriptor, f"{name}\n".encode())

    return act


def kill(at: int) -> Fault:
    """Return a fault that sends SIGKILL before operation `at`, or in the middle of it if it can be halved."""

    def act(number: int, name: str, half: Half | None) -> None:
        if number == at:
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def fail(at: int) -> Fault:
    """Return a fault that makes operation `at` fail as on a broken disk."""

    def act(number: int, name: str, half: Half | None) -> None:
        if number == at and not name.startswith("shutil."):  # shutil's events only announce other operations
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    return act


def fill(at: int, folder: str, room: int) -> Fault:
    """Return a fault that fills a disk before operation `at`, except for `room` bytes. If `room` is -1, it takes all
    inodes instead."""

    def act(number: int, name: str, half: Half | None) -> None:
        if number == at:
            fill_disk(Path(folder), room)

    return act


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a small file system at `folder`. Skips the test if this machine does not allow that."""
    import pytest  # here, because ranks import this module, too

    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(folder: Path, room: int) -> None:
    """Take all space of a small disk except `room` bytes, or all its inodes if `room` is -1. Uses plain system calls,
    none of which is counted."""
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
    """Delete the files of `fill_disk`."""
    for path in folder.glob("ballast*"):
        path.unlink()


def around(where: str, wrapper: Callable[..., Any]) -> None:
    """Replace the function `where`, named as in CALLS, by one that calls `wrapper(original, *arguments)`."""
    place, _, name = where.replace(":", ".").rpartition(".")
    owner = pkgutil.resolve_name(place)
    held = vars(owner)[name]
    is_of_class = isinstance(held, classmethod)
    function = held.__func__ if is_of_class else held

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return wrapper(function, *arguments, **options)

    setattr(owner, name, classmethod(wrapped) if is_of_class else wrapped)


def inject(call: str, number: int, fault: Fault) -> None:
    """Call `fault` before each file operation of the call `number` (from 0) of CALLS[call], on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        sys.dont_write_bytecode = True  # else a module imported during the call would add operations
        operations = Operations(fault)
        operations.watch_calls(CALLS[call], number)
        operations.watch_files()


class Operations:
    """Counter of the file operations of one thread during one call."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.thread: int | None = None  # the thread that is in the call, None outside of the call
        self.count = 0

    @property
    def counts(self) -> bool:
        return self.thread == threading.get_ident()

    def next(self, name: str, half: Half | None = None) -> None:
        """Count an operation that is about to happen, and call the fault. The fault's own operations do not count."""
        if self.counts:
            thread, self.thread = self.thread, None
            self.count += 1
            self.fault(self.count - 1, name, half)
            self.thread = thread

    def watch_calls(self, where: str, number: int) -> None:
        calls = itertools.count()

        def watched(original: Callable[..., Any], *values: Any, **named: Any) -> Any:
            if next(calls) != number:
                return original(*values, **named)
            self.thread = threading.get_ident()
            try:
                return original(*values, **named)
            finally:
                self.thread = None

        around(where, watched)

    def watch_files(self) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # set here, because a background thread may not
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
            def reserve() -> None:  # the kernel kills the process when Rust reserves the file's space
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                sys.dont_write_bytecode = True  # bytecode files would be cut short, too
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
                original(tensors, path, **named)

            def write_half() -> None:  # under a name like that of Rust's temporary file
                original(tensors, path, **named)
                path.rename(path.with_name(".tmpA1b2C3"))
                os.truncate(path.with_name(".tmpA1b2C3"), path.with_name(".tmpA1b2C3").stat().st_size // 2)

            self.next(f"write {path.name}")
            self.next(f"reserve {path.name}", reserve)
            self.next(f"half of {path.name}", write_half)
            original(tensors, path, **named)

        return watched


class CountedFile(io.FileIO):
    """File of which each write counts as an operation that can be halved."""

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
