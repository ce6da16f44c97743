"""The process that started this one as a rank, and how this one ends when that has ended.

torchrun, and `ddp_train.py --processes`, end their ranks when they leave in good order. When they are killed (by the
out-of-memory killer, by a container that closes) nobody does, and nobody would see the ranks' output, restart them or
stop them: they would train on at the price of the machine, or wait for hours at a rendezvous whose store has died with
torchrun. So each rank looks after its launcher itself, in a thread, from its first line on.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

from harness.common.errors import tell_soon
from harness.common.exit import EXIT
from harness.common.processes import start_time

# The pid of the ddp_train.py that has started this rank (distributed/environment.py).
PARENT = "DDP_TRAIN_PARENT"
POLL_SECONDS = 0.5
# For the step that is under way and its checkpoint; with what noticing takes, all ranks are gone 15 s after torchrun.
ENDING_SECONDS = 12.0

_launcher = 0  # the pid of the parent that this process looks after; 0: of none
_ask_to_stop: Callable[[], None] | None = None


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_launched() -> bool:
    """True in a rank that has a launcher to look after."""
    return PARENT in os.environ or started_by_torchrun()


def exit_when_launcher_dies() -> None:
    """Have this process end soon after its launcher, if it has one."""
    global _launcher
    if _launcher or not is_launched():
        return
    _launcher = os.getppid()
    if _is_orphan():  # the launcher was killed before this line was reached
        _leave("")
    threading.Thread(target=_look_after_launcher, daemon=True, name="launcher").start()


def is_gone() -> bool:
    """True once the launcher has ended: the system then gives its children another parent."""
    return _launcher not in (0, os.getppid())


def on_launcher_death(ask: Callable[[], None]) -> None:
    """Once the launcher has ended call `ask`, in another thread than this one, and give the process ENDING_SECONDS to
    end by itself. Without such a function it is ended at once."""
    global _ask_to_stop
    _ask_to_stop = ask


def _look_after_launcher() -> None:
    # Once more after a pause: a launcher that is being killed can have lost its children and not yet closed its store.
    time.sleep(POLL_SECONDS)
    was_orphan = _is_orphan()
    while not (was_orphan or is_gone()):
        time.sleep(POLL_SECONDS)
    if _ask_to_stop is None:
        _leave("")
    else:
        _ask_to_stop()
        time.sleep(ENDING_SECONDS)
        _leave(f" before a checkpoint was written in {ENDING_SECONDS:g} s")


def _leave(where: str) -> None:
    is_told = EXIT.is_explained or EXIT.has_own_reason
    EXIT.note_explained()
    if os.environ.get("LOCAL_RANK", "0") == "0" and not is_told:
        name = "ddp_train.py --processes" if PARENT in os.environ else "torchrun"
        tell_soon(
            f"{name} has ended (killed?){where}, and its processes with it; run the same command again to continue"
        )
    os._exit(1)


def _is_orphan() -> bool:
    """True if the launcher had ended before its pid was read. torchrun does not pass its pid on, but the store that it
    keeps would answer. False on other machines than the store's, where nothing is known."""
    if PARENT in os.environ:
        return os.environ[PARENT] != str(os.getppid())
    if os.environ.get("GROUP_RANK") != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    try:
        # Bytes: for text Python would import a codec, and wait for an import that is under way in the main thread.
        address = os.environb[b"MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with socket.socket() as store:
            store.settimeout(ENDING_SECONDS / 2)
            store.connect(address)
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError, ValueError):  # for others to tell
        return False
    return False


def launcher_name() -> str:
    """The process that started this one and that would start another in its place: its pid, and its time of start.
    Empty without a launcher."""
    if not is_launched():
        return ""
    pid = _launcher or os.getppid()
    return f"{pid} {start_time(pid)}".strip()


def has_ended(name: str) -> bool:
    """True if the launcher of this machine that `launcher_name` called `name` is known to have ended."""
    pid, _, started = name.partition(" ")
    return pid.isdigit() and started.isdigit() and start_time(int(pid)) != started
