"""Rank of this process, read from the environment, and the start of all ranks for `--processes`. Does not load torch.

Any launcher can be used that sets COUNTS and, for several ranks, RENDEZVOUS_ADDRESS (torch.distributed's `env://`).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple, NoReturn

from harness.common.errors import (
    EXIT,
    STOPPING_SIGNALS,
    UserError,
    described,
    handle_stopping_signals,
    say_last,
    tell_soon,
)
from harness.common.libraries import usable_cores
from harness.common.messages import quoted
from harness.common.processes import ENDING_SECONDS, PARENT

# In the order of the fields of Ranking.
COUNTS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
RENDEZVOUS_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
LARGEST_PORT = 65535
RANKS_PER_CORE = 8  # each rank loads half a gigabyte of libraries; a larger number is a mistake
STORE_DESCRIPTOR = "DDP_TRAIN_STORE"  # set in rank 0: descriptor of the socket that `run_ranks` opened for the store
POLL_SECONDS = 0.05
STOPPING_SECONDS = 2.0  # how long ranks that were asked to stop may take after the first one has failed


class Ranking(NamedTuple):
    """Rank of a process among all ranks (`rank` of `world_size`), and among the ranks of its machine (`local_rank` of
    `local_world_size`)."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def read_ranking() -> Ranking:
    """Return the ranking that the launcher's environment variables give, or that of a single process if none of COUNTS
    is set. Raises UserError if a variable is missing or wrong."""
    given = [name for name in COUNTS if name in os.environ]
    if not given:
        return Ranking()
    needed = [*COUNTS, *(RENDEZVOUS_ADDRESS if os.environ.get("WORLD_SIZE") != "1" else ())]
    texts, fault = {name: os.environ.get(name, "") for name in needed}, ""
    for name, text in texts.items():
        # With only some of these, the run would be another one than intended, or would wait for ranks that never come.
        if not text:
            fault = fault or f"{given[0]} is set, but {name} is not"
        elif name != "MASTER_ADDR" and not re.fullmatch(r"[0-9]{1,9}", text):
            fault = fault or f"{name} is {quoted(text)}, which is not a whole number"
    if not fault:
        numbers = {name: int(text) for name, text in texts.items() if name != "MASTER_ADDR"}
        found = Ranking(*(numbers[name] for name in COUNTS))
        if (
            found.local_rank <= found.rank < found.world_size
            and found.local_rank < found.local_world_size <= found.world_size
            and 1 <= numbers.get("MASTER_PORT", 1) <= LARGEST_PORT
        ):
            return found
        fault = f"{' '.join(f'{name}={number}' for name, number in numbers.items())} cannot all be right"
    remedy = f"start all ranks with --processes or torchrun, or for a single process `unset {' '.join(given)}`"
    raise UserError(f"environment: {fault}; {remedy}")


def ranks_to_start(processes: int | None) -> int:
    """Return the number of ranks to start for --processes: 0 if this process is itself a rank or the only process.
    Raises UserError if --processes is given to a rank that another launcher started."""
    if processes is None or PARENT in os.environ:
        return 0
    if "RANK" in os.environ:
        raise UserError(f"RANK is set: leave out --processes under torchrun; otherwise `unset {' '.join(COUNTS)}`")
    return processes if processes > 1 else 0


def run_ranks(count: int, when_started: Callable[[int], None]) -> NoReturn:
    """Run this process's command in `count` ranks on this machine. When all have ended, exit with the status of the
    first that failed, or 0.

    Each rank must call `unblock_stopping_signals`, and then gets the signals that ask this process to stop.
    `when_started` is called with the pid of rank 0. Raises UserError if `count` is too large for this machine.
    """
    if count > (most := RANKS_PER_CORE * usable_cores()):
        raise UserError(f"--processes {count}: at most {most} here, {RANKS_PER_CORE} for each core; give fewer")
    ranks: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        for rank in ranks:
            rank.send_signal(number)

    # Signals are blocked until this process has ranks to forward them to, and in each rank until it can end with a
    # one-line message.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING_SIGNALS)
    handle_stopping_signals(pass_on)
    with socket.create_server(("127.0.0.1", 0)) as store:
        host, port = store.getsockname()
        shared = {PARENT: os.getpid(), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        shared |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        for rank in range(count):
            variables = {**shared, "RANK": rank, "LOCAL_RANK": rank}
            if rank == 0:  # inherits the open socket, so that no other process can take the port before it is used
                variables[STORE_DESCRIPTOR] = store.fileno()
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            inherited = [store.fileno()] if rank == 0 else []
            command = [sys.executable, *sys.argv]
            # A session, and so a process group, of its own: Ctrl-C in a terminal reaches only this process, which
            # forwards it.
            ranks.append(subprocess.Popen(command, env=environment, pass_fds=inherited, start_new_session=True))
    unblock_stopping_signals()
    when_started(ranks[0].pid)
    first_nonzero = _wait(ranks, asked)
    # Rank 0 has printed this, unless it was killed, or the signal ended another rank before all could agree to stop.
    if asked and ((ranks[0].returncode or 0) < 0 or (first_nonzero and -first_nonzero.returncode in asked)):
        say_last(f"\nstopped by {described(asked[0])}; to continue, {EXIT.again}")
    elif first_nonzero and first_nonzero.returncode < 0 and -first_nonzero.returncode not in asked:
        name = signal.Signals(-first_nonzero.returncode).name
        text = f"rank {ranks.index(first_nonzero)} (pid {first_nonzero.pid}) was ended by {name}"
        tell_soon(f"{text}{' (out of memory?)' * (name == 'SIGKILL')}; {EXIT.again} to continue")
    status = first_nonzero.returncode if first_nonzero else 0
    status = status if status >= 0 else 128 - status
    EXIT.before_end(status)
    raise SystemExit(status)


def _wait(ranks: list[subprocess.Popen[bytes]], asked: list[int]) -> subprocess.Popen[bytes] | None:
    """Wait until all ranks have ended. Once a rank has failed, end the others. Return the first that failed, or None.
    `asked` has the signals that were forwarded to the ranks so far."""
    first_nonzero, since, due = None, 0.0, [(0.0, signal.SIGTERM), (ENDING_SECONDS, signal.SIGKILL)]
    while True:
        running = [rank for rank in ranks if rank.poll() is None]
        if first_nonzero is None and (first_nonzero := next((rank for rank in ranks if rank.returncode), None)):
            # Ranks that were asked to stop are ending already.
            since = time.monotonic() + (STOPPING_SECONDS if asked else 0.0)
        if not running:
            return first_nonzero
        if first_nonzero and due and time.monotonic() - since >= due[0][0]:
            number = due.pop(0)[1]
            for rank in running:
                rank.send_signal(number)
        time.sleep(POLL_SECONDS)


def unblock_stopping_signals() -> None:
    """Unblock the signals that ask to stop, which `run_ranks` has blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING_SIGNALS)
