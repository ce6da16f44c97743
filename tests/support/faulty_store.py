"""Faults at exact operations of a mirror's store, in the process under test or in the test's own.

    prelude = "from tests.support import faulty_store, file_operations as f; faulty_store.watch('file', f.kill(17))"

Every call that the program makes on the store counts, on any thread, and calls a fault first. A write counts once more
in its middle, and once more when it is done but not yet answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fsspec import get_filesystem_class, register_implementation

from tests.support.file_operations import Fault, Half

# A store's lease ends soon, and failed calls are tried again soon.
HASTE = """
import harness.mirror.owner as o, harness.mirror.upload as u
o.LEASE_SECONDS, u.FIRST_PAUSE_SECONDS, u.LONGEST_PAUSE_SECONDS = 1.0, 0.01, 0.02
"""


def watch(scheme: str, fault: Fault) -> Callable[[], None]:
    """Call `fault` at every operation of a store with this scheme. Return a function that ends this."""
    base, count = get_filesystem_class(scheme), 0

    inner = threading.local()  # a call that the file system makes on itself does not count

    def happens(name: str, path: Any) -> None:
        nonlocal count
        if not getattr(inner, "depth", 0):
            count += 1
            fault(count - 1, f"{name} {path.rpartition('/')[2]}", None)

    def writes(name: str) -> Any:
        def write(self: Any, source: Any, target: str, **options: Any) -> None:
            data = source if isinstance(source, bytes) else open(source, "rb").read()  # noqa: SIM115
            happens(name, target)
            super(Watched, self).pipe_file(target, data[: len(data) // 2])
            happens(f"half of {name}", target)
            super(Watched, self).pipe_file(target, data)
            happens(f"after {name}", target)

        return write

    def reads(name: str) -> Any:
        def read(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
            happens(name, path)
            inner.depth = getattr(inner, "depth", 0) + 1
            try:
                return getattr(super(Watched, self), name)(path, *arguments, **options)
            finally:
                inner.depth -= 1

        return read

    put = writes("put_file")
    pipe = writes("pipe_file")

    class Watched(base):  # type: ignore[misc, valid-type]
        put_file = put

        def pipe_file(self, target: str, data: bytes, **options: Any) -> None:
            pipe(self, bytes(data), target)

    for name in ("find", "ls", "info", "cat_file", "mv", "rm", "makedirs"):
        setattr(Watched, name, reads(name))
    register_implementation(scheme, Watched, clobber=True)
    return lambda: register_implementation(scheme, base, clobber=True)


def fail(error: BaseException, *, window: range) -> Fault:
    """Return a fault that raises `error` at the operations whose numbers are in `window`."""

    def act(number: int, name: str, half: Half | None) -> None:
        if number in window:
            raise error

    return act
