"""The kinds of failure a user sees, and the ends of this process: one line instead of a traceback, signals that ask it
to stop, and output that nobody reads any more.

Three parts of the program can end the process: the main thread with an error (`one_line_errors`), the watchdog that
found a rank at fault (distributed/watchdog.py), and the thread that waits for the launcher's end (common/processes.py).
`EXIT` is what they know of one another.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

# How long a rank that has nothing of its own to say lets another one speak, before it leaves by itself: torchrun ends
# every rank as soon as the first one has left, so leaving early could cut the message off.
SPEAKER_PATIENCE_SECONDS = 10.0
TELLING_SECONDS = 1.0
# SIGHUP: the terminal has been closed, or the connection to it has broken. SIGQUIT: Ctrl-\\, which torchrun passes on.
STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class UserError(Exception):
    """The command, a configuration file or the data is wrong: nothing was attempted. Exit status 2."""

    exit_status = 2


class RunError(Exception):
    """The work was under way and cannot go on (no space, a diverged loss, a lost peer). Exit status 1."""

    exit_status = 1


class PeerError(RunError):
    """Another rank failed and prints the reason. This rank prints its own message only if that rank does not."""


class RunStopped(RunError):  # noqa: N818 - the orderly end of a run
    """A signal ended the run in an orderly way, and the user has been told. Exit status 128 + the signal's number, as
    shells have it."""

    def __init__(self, signal_number: int, during: str | None = None) -> None:
        """`during` is the evaluation that was left off for it, if it was one."""
        super().__init__(signal_number, during)
        self.signal = signal_number
        self.during = during
        self.exit_status = 128 + signal_number


@dataclass
class Exit:
    """State of this process's exit, shared by its threads, so that the reason is printed once. No entry is reset."""

    has_own_reason: bool = False  # the main thread ends the process, and says why
    # The main thread ends it soon, because another rank has gone; the watchdog may find out which one, and why.
    has_lost_peer: bool = False
    is_explained: bool = False  # the user has been told why the processes of this machine end, or is being told
    stop_signal: int = 0  # the last one that has asked this process to end in good order; 0: none has


EXIT = Exit()  # of this process


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line on standard error for the failures a user can act on.

    Under torchrun every process of a node meets the same wrong file, so that the node's first process speaks and the
    others wait for torchrun to end them; if it never does, they speak for themselves.
    """
    try:
        yield
        if _launched("WORLD_SIZE", 1) > 1:
            # At the interpreter's shutdown, threads of torch's that are still in C++ can abort the process ("terminate
            # called without an active exception"), and torchrun would take a finished rank for one that has failed.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    except (UserError, RunError) as error:
        _leave(error)
    except BrokenPipeError:  # the reader of a pipe, `head` say, has enough
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        _leave(RunError(f"{place_of(error) or 'a file'}: {error.strerror or error}"))
    except KeyboardInterrupt:  # before or after training, which takes note of it itself
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has nothing to add
        if _local_rank() == 0:
            say_last("stopped by SIGINT; to continue, run the same command again")
        _leave(RunStopped(signal.SIGINT))
    except Exception:
        if "LOCAL_RANK" not in os.environ:
            raise
        traceback.print_exc()  # a defect of ours; with other ranks about, the process must not hang at its end
        sys.stderr.flush()
        _leave_to_torchrun(traceback.format_exc())
        os._exit(1)


def _launched(name: str, default: int) -> int:
    """A launcher's variable, or `default` if it is no number: distributed/environment.py tells that."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else default


def _local_rank() -> int:
    """This process's number on its machine; 0 for a leftover LOCAL_RANK, since no other rank would print the error."""
    return _launched("LOCAL_RANK", 0) if _launched("LOCAL_WORLD_SIZE", 1) > 1 else 0


def place_of(error: OSError) -> str | None:
    """The file that could not be read or written, or "standard output"; None if unknown. A failed write names no file,
    so this prints one more line, which fails too if standard output is at fault."""
    if error.filename is None and sys.stdout is not None:  # None: it was closed from the beginning
        try:
            print(flush=True)
        except OSError:
            return "standard output"
    return error.filename


def printable(text: str) -> str:
    """The text on one line, without what a terminal would obey: it may quote a file."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def tell(reason: str) -> None:
    """Say on standard error, in one line, why this process ends."""
    say_last(f"error: {printable(reason)}")


def tell_soon(reason: str) -> None:
    """`tell`, but return also where writing waits: for the reader of a full pipe, or a terminal that is paused."""

    def say() -> None:
        with suppress(OSError):
            print(file=sys.stderr)  # there may be a bar
        tell(reason)

    telling = threading.Thread(target=say, daemon=True)
    telling.start()
    telling.join(TELLING_SECONDS)


def say_last(line: str) -> None:
    """Print on standard error, even if it is closed, how this process ends; torchrun's report ends with it, too."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
    _leave_to_torchrun(line)


def _leave_to_torchrun(text: str) -> None:
    """torchrun prints a page of its own once a rank has failed. Let it end with this text, too: it comes from a file
    that torchrun names for that (torch.distributed.elastic.multiprocessing.errors has its form)."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    # Of all ranks the one with the earliest time is shown, and those that torchrun ends itself get the same second's.
    extra = {"py_callstack": f"\n\n{text}", "timestamp": str(int(time.time()) - 1)}
    content = json.dumps({"message": {"message": text, "extraInfo": extra}})
    with suppress(OSError):
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(content, encoding="utf-8")


def _leave(error: UserError | RunError) -> None:
    if isinstance(error, PeerError):
        EXIT.has_lost_peer = True
    else:
        EXIT.has_own_reason = True
    if isinstance(error, PeerError) or (isinstance(error, UserError) and _local_rank() != 0):
        for number in STOPPING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if EXIT.stop_signal:  # torchrun's, say, for the rank that speaks: it came just before it would end this one
            error = RunStopped(EXIT.stop_signal)
        else:
            time.sleep(SPEAKER_PATIENCE_SECONDS)
    if not isinstance(error, RunStopped) and not EXIT.is_explained:
        tell(str(error))
    # Not sys.exit: interpreter shutdown would wait for communication threads whose peers may already be gone.
    if sys.stdout is not None:  # None: it was closed from the beginning
        with suppress(OSError):
            sys.stdout.flush()
    os._exit(error.exit_status)


# Signals that ask to stop, and output that nobody reads any more ----------------------------------------------------


def handle_stopping_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Have `handler` called for every signal that asks a run to stop."""
    for number in STOPPING_SIGNALS:
        if number != signal.SIGHUP or not ignores_hangup():
            signal.signal(number, handler)


def ignores_hangup() -> bool:
    """True if this process ignores SIGHUP, as nohup has it do, to outlive its terminal."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def described(signal_number: int) -> str:
    """The signal by its name, and what it means if that is more than a request."""
    name = signal.Signals(signal_number).name
    if signal_number != signal.SIGHUP:
        return name
    return f"{name} (the terminal, the launcher or the reader of the output is gone)"


class DetachableOutput(io.FileIO):
    """A file descriptor for writing. Once nobody is at its other end, what is written to it is dropped."""

    def __init__(self, descriptor: int, when_gone: Callable[[], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        # What writing to a closed terminal, and to a pipe without a reader, fails with.
        self._signs = {errno.EIO} if self.isatty() else {errno.EPIPE}
        self._when_gone = when_gone

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self._signs:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())  # also for what libraries in C++ say
        os.close(nowhere)
        self._when_gone()
        return memoryview(data).nbytes


def survive_closed_output(when_gone: Callable[[], None]) -> None:
    """Make lost output no error from now on, which would end hours of training without a checkpoint: the rest is
    dropped, and `when_gone` is called once for each of standard output and error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:  # None: closed from the beginning
            stream.flush()
            buffer = io.BufferedWriter(DetachableOutput(stream.fileno(), when_gone))
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True))
