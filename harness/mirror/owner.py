"""The lease on a run's folder in a mirror: `owner.json` names the machine that trains the run. That machine rewrites
the file every REFRESH_SECONDS.

The lease keeps two machines from training one run by mistake, but is not a lock. Two machines that start within the
same few seconds may both take it. Then the machine whose owner.json is overwritten stops sending.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from harness.common.errors import RunError, UserError
from harness.common.files import replace_text
from harness.common.messages import quoted
from harness.mirror.fetch import retried
from harness.mirror.store import Mirror
from harness.runs.directory import RunDirectory
from harness.runs.metrics import rough_duration

OWNER = "owner.json"
KEPT = ".mirror.json"
CLOCK = ".clock"  # written to learn the time of the store's clock
LEASE_SECONDS = 300.0  # if an owner has been silent for longer, another machine may take the run
REFRESH_SECONDS = 30.0  # between two writes of owner.json
WAITING_SECONDS = 5.0  # between two readings of another machine's owner.json


class LeaseLost(RunError):  # noqa: N818 - not an error of this machine
    """Exception raised once another machine has taken the run. Its message is that machine's name, or
    "another machine"."""


class Lease:
    """This machine's claim on a run in a mirror. A thread renews it until `release`."""

    def __init__(self, mirror: Mirror, run: RunDirectory) -> None:
        # Not the mirror that uploads use: not every library can be used by several threads.
        self._mirror = Mirror(mirror.url, mirror.run_name)
        self._run = run
        self._id = own_id(run)
        self._since = time.time()
        self._released, self._using = threading.Event(), threading.RLock()  # `_using`: held while `_mirror` is used
        self._written = 0.0  # the time of this machine's last owner.json
        self._lost: str | None = None

    def take(self, *, wait: bool, take_over: bool) -> None:
        """Write owner.json and keep it fresh until `release`. Raises RunError if owner.json cannot be read or written.

        If another machine is the owner and was heard from in the last LEASE_SECONDS:
        - `take_over` takes the run at once.
        - `wait` waits, even while the store fails, until that machine releases the run or falls silent.
        - Without either of them, raises UserError.
        """
        told = False
        while not take_over:
            try:
                other, silent = retried(self._mirror, owner_of, self._mirror, own=self._id)
            except RunError:
                if not told:
                    raise
                continue  # in a wait of days, the store may fail for longer than the retries last
            if other is None or silent > LEASE_SECONDS:
                break
            heard = f"last heard from {rough_duration(max(0.0, silent))} ago"
            if not wait:
                raise UserError(
                    f"mirror {self._mirror.name}: {other} trains this run, {heard}: stop it there; --take-over takes "
                    "the run now, and ddp_train.py --wait waits until the run has ended there or that machine has been "
                    f"silent for {rough_duration(LEASE_SECONDS)}"
                )
            if not told:
                print(f"waiting for {other}, which trains this run, {heard}", flush=True)
                told = True
            time.sleep(min(WAITING_SECONDS, LEASE_SECONDS / 4))
        retried(self._mirror, self._write)
        threading.Thread(target=self._refresh, daemon=True, name="mirror-lease").start()

    def check(self) -> None:
        """Raise LeaseLost if another machine has taken the run, or the errors of the store if owner.json cannot be
        read."""
        if self._lost is None:
            with self._using:
                is_silent = time.time() - self._written > LEASE_SECONDS
                # If the store is away, such as a disk that is not mounted, every file seems to be missing. It may come
                # back between the two readings, so train.json is read first.
                may_be_released = is_silent and self._mirror.read("train.json") is not None
                owner = _parse(self._mirror.read(OWNER))
            if owner and owner.get("id") != self._id:
                self._lost = _host(owner)
            elif owner is None and may_be_released:
                # Another machine took the run while this one was frozen or offline, and has released it.
                self._lost = "another machine"
        if self._lost is not None:
            raise LeaseLost(self._lost)

    def write(self) -> None:
        """Write owner.json now. Raises LeaseLost if another machine has taken the run, and the errors of the store."""
        with self._using:
            self.check()  # that machine may have released the run, too, while this one was frozen
            self._write()

    def release(self) -> None:
        """Stop renewing the lease, and delete this machine's owner.json, so that another machine can take the run at
        once. Raises the errors of the store."""
        self._released.set()
        with self._using, suppress(LeaseLost):
            self.check()
            self._mirror.delete(OWNER)

    def _refresh(self) -> None:
        while not self._released.wait(min(REFRESH_SECONDS, LEASE_SECONDS / 4)):
            try:
                with self._using:
                    self.check()
                    if not self._released.is_set():
                        self._write()
            except LeaseLost:
                return
            except Exception:  # the thread that sends files to the same store fails, too, and reports it
                with self._using, suppress(Exception):
                    self._mirror.open()

    def _write(self) -> None:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "id": self._id, "run": self._mirror.run_name}
        owner |= {"since": self._since, "heard": time.time()}
        self._mirror.write(OWNER, json.dumps(owner, indent=2).encode() + b"\n")
        self._written = time.time()


def owner_of(mirror: Mirror, *, own: str | None = None) -> tuple[str | None, float]:
    """Return the host that owns the run in a mirror, and the seconds for which it was silent. Return None and 0 if the
    run has no owner, or if the owner's id is `own`. Raises the errors of the store.

    With `own`, a file is written and deleted to measure the silence by the store's clock. Without `own`, or if the
    store has no clock, two machines' clocks are compared, and the seconds can be negative.
    """
    owner = _parse(mirror.read(OWNER))
    if owner is None or (own is not None and owner.get("id") == own):
        return None, 0.0
    heard, now = (mirror.modified(OWNER), None) if own else (None, None)
    if heard is not None:
        mirror.write(CLOCK, b"\n")
        now = mirror.modified(CLOCK)
        mirror.delete(CLOCK)
    if heard is None or now is None:
        recorded = owner.get("heard")
        heard, now = float(recorded) if isinstance(recorded, int | float) else 0.0, time.time()
    return _host(owner), now - heard


def own_id(run: RunDirectory) -> str:
    """Return the random id by which owner.json names this machine. Later processes get the same id, which is kept in
    the run's folder. A copy of the folder gets a new id if its path or the machine's host name differs."""
    known = remembered(run)
    # Kept, so that a killed run that is started again does not wait for its own lease.
    if isinstance(known.get("id"), str):
        return known["id"]
    made = secrets.token_hex(8)
    with suppress(OSError):  # without the file, only a restart has to wait for its own lease
        remember(run, id=made)
    return made


def remembered(run: RunDirectory) -> dict[str, Any]:
    """Return what `remember` has kept in the run's folder, or an empty dict if the file is missing, damaged, or from
    another host or folder."""
    with suppress(OSError, ValueError):
        known = json.loads((run.path / KEPT).read_text(encoding="utf-8"))
        is_here = isinstance(known, dict) and known.get("host") == socket.gethostname()
        if is_here and known.get("folder") in (None, str(run.path.resolve())):
            return known
    return {}


def remember(run: RunDirectory, **values: Any) -> None:
    """Add `values` to the hidden file KEPT in the run's folder. Their keys are "id" (see `own_id`) and
    "bytes_per_second" (of the last upload). Raises OSError if the file cannot be written."""
    here = {"host": socket.gethostname(), "folder": str(run.path.resolve())}
    known = {**remembered(run), **here, **values}
    replace_text(run.path / KEPT, json.dumps(known) + "\n")


def _parse(content: bytes | None) -> dict[str, Any] | None:
    """Return the object in an owner.json, None if there is no such file, or an empty dict (an owner without a name) if
    the file is damaged."""
    if content is None:
        return None
    with suppress(ValueError):
        if isinstance(owner := json.loads(content), dict):
            return owner
    return {}


def _host(owner: dict[str, Any]) -> str:
    return quoted(owner["host"]) if "host" in owner else "another machine"
