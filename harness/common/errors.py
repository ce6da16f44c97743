"""Exceptions that end this process with one line instead of a traceback, signals that ask it to stop, and output that
nobody reads any more."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

AGAIN = "run the same command again"
# How long a rank waits for another rank to print the error before it prints its own error and exits. torchrun ends all
# ranks as soon as the first one has exited, so exiting earlier could cut off the other rank's message.
SPEAKER_PATIENCE_SECONDS = 10.0
TELLING_SECONDS = 1.0
# SIGHUP: the terminal has been closed, or the connection to it has broken. SIGQUIT: Ctrl-\, which torchrun passes on.
STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
Handler = Callable[[int, FrameType | None], None]


class UserError(Exception):
    """Error that the user must correct in the command, a configuration file or the data. Exit status 2."""

    exit_status = 2


class RunError(Exception):
    """Failure of work that was under way (a full disk, logits that are not finite, a lost rank). Exit status 1."""

    exit_status = 1


class PeerError(RunError):
    """Failure of another rank, which prints the reason."""


# Reasons to stop a run other than signals. Their numbers are above those of all signals. STATUSES: their exit statuses.
CEILING = 101  # max_hours or max_dollars of train.json is reached
DIVERGED = 102  # the training loss has diverged
STATUSES = {CEILING: 3, DIVERGED: 4}


@contextmanager
def explained(before: str = "", after: str = "") -> Iterator[None]:
    """Put `before` in front of the message of a UserError that the body raises, and `after` behind it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{before}{error}{after}") from None


@contextmanager
def os_errors_as(kind: type[UserError | RunError], place: str, after: str = "") -> Iterator[None]:
    """Turn the body's OSError into a `kind` error. Its message is `place`, the system's reason, and `after`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{place}: {error.strerror}{after}") from None


class RunStopped(RunError):  # noqa: N818 - the orderly end of a run
    """Orderly end of a run after a signal, or for a reason in STATUSES. The command or the launcher prints the message
    for the user."""

    def __init__(self, reason: int, interrupted_evaluation: str | None = None) -> None:
        """Store `reason`: a signal's number, or a key of STATUSES.

        If an evaluation of the last completed step was interrupted, `interrupted_evaluation` is "validation" or
        "benchmarks".
        """
        super().__init__(reason, interrupted_evaluation)
        self.reason = reason
        self.interrupted_evaluation = interrupted_evaluation
        self.exit_status = STATUSES.get(reason, 128 + reason)


@dataclass
class Exit:
    """State of this process's exit, shared by its threads so that the reason is printed once."""

    again: str = AGAIN  # the remedy in messages; `tell_how_to_continue` changes it
    has_own_reason: bool = False  # the main thread is ending the process and prints the reason itself
    # The main thread is about to end the process because another rank is gone. The watchdog may find out which and why.
    has_lost_peer: bool = False
    peer_reason: str | None = None  # why another rank fails, once this one knows
    is_explained: bool = False  # the reason why this machine's processes end has been printed, or is being printed
    stop_signal: int = 0  # number of the last signal that asked this process for an orderly end; 0 if there was none
    # Called with the exit status after this process's last message, even if that is an error. Not called if another
    # thread (such as the watchdog) or a closed pipe ends the process, or if `one_line_errors` does not catch the error.
    before_end: Callable[[int], None] = lambda status: None


EXIT = Exit()


def tell_how_to_continue(undoing: str | None) -> None:
    """Set `EXIT.again`, the remedy in this process's messages: to run the same command again. `undoing` is an argument
    of the command that undoes earlier work, such as "--restart", or None. The remedy then says to omit it if it has
    taken effect."""
    EXIT.again = f"{AGAIN} (without {undoing} if that has taken effect)" if undoing else AGAIN


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Context manager for a command: end this process with one line instead of a traceback if the body fails.

        end of the body      on standard error                                   exit status
        normal               nothing                                             0
        UserError            its message, under a launcher once per machine      2, or 128 + signal
        RunError             its message                                         1
        PeerError            its message, unless another rank's comes first      1, or 128 + signal
        RunStopped           nothing: the body or the launcher prints a message  its own
        BrokenPipeError      nothing                                             128 + SIGPIPE
        OSError              the file and the system's reason                    1
        KeyboardInterrupt    the signal and how to continue, once per machine    128 + signal
        any other Exception  the traceback                                       1

    `signal` is the number of the signal that stops this process. If there are several ranks, this process exits here
    even after a normal end of the body.
    """
    # A process without other ranks prints its error whatever LOCAL_RANK says, since no other rank would.
    is_first = launcher_number("LOCAL_WORLD_SIZE", 1) < 2 or launcher_number("LOCAL_RANK", 0) == 0
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed before Python started
            # The descriptor stays open when `survive_closed_output` puts another stream on it.
            null = open(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)  # noqa: SIM115
            setattr(sys, name, null)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # the stream's descriptor now refers to another file
                stream.reconfigure(errors="backslashreplace")  # else a character that it cannot encode ends the run
    try:
        yield
        EXIT.before_end(0)
        if launcher_number("WORLD_SIZE", 1) > 1:
            # When the interpreter shuts down, torch's threads that still run C++ code can abort the process ("terminate
            # called without an active exception"), and torchrun would report a finished rank as failed.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(0)
    except (UserError, RunError) as error:
        _exit_because_of(error, is_first=is_first)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        end = RunError(f"{place_of(error) or 'a file'}: {error.strerror or error}")
        _exit_because_of(end, is_first=is_first)
    except KeyboardInterrupt:  # not during training, which handles SIGINT itself
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the exit
        number = EXIT.stop_signal or signal.SIGINT
        if is_first:
            say_last(f"stopped by {signal.Signals(number).name}; to continue, {EXIT.again}")
        _exit_because_of(RunStopped(number), is_first=is_first)
    except Exception:
        if "LOCAL_RANK" not in os.environ:
            raise
        say_last(traceback.format_exc().rstrip())
        EXIT.before_end(1)
        os._exit(1)  # at once, because a normal exit could hang while other ranks are running


def _exit_because_of(end: UserError | RunError, *, is_first: bool) -> NoReturn:
    """Print the message of `end`, and exit. Prints nothing for RunStopped, or if a reason has been printed already.

    `is_first` is true in the first or only rank of this machine.
    """
    if isinstance(end, PeerError):
        EXIT.has_lost_peer = True
    else:
        EXIT.has_own_reason = True
    # Another rank prints the reason. A wrong file makes all ranks of a machine raise the same UserError.
    if isinstance(end, PeerError) or (isinstance(end, UserError) and not is_first):
        for number in STOPPING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        # torchrun, for example, sends SIGTERM after the other rank has printed its error and exited. If that signal
        # arrived before the loop above restored the default handlers, it did not end this process.
        if EXIT.stop_signal:
            end = RunStopped(EXIT.stop_signal)
        else:
            time.sleep(SPEAKER_PATIENCE_SECONDS)
    if not isinstance(end, RunStopped) and not EXIT.is_explained:
        say_last(f"error: {printable(str(end))}")
    # Not sys.exit: interpreter shutdown would wait for communication threads whose peers may already be gone.
    with suppress(OSError):
        sys.stdout.flush()
    # If another rank is gone, the run has failed, even if this rank was then asked to stop.
    EXIT.before_end(RunError.exit_status if EXIT.has_lost_peer else end.exit_status)
    os._exit(end.exit_status)


def launcher_number(name: str, default: int) -> int:
    """Return the number in a launcher's environment variable, or `default` if it is unset or wrong. `read_ranking`
    refuses wrong values of the variables in COUNTS."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else default


def place_of(error: OSError) -> str | None:
    """Return the file of a failed read or write, "standard output", or None if unknown.

    If `error` names no file, an empty line is printed to find out if standard output fails.
    """
    # The error of a failed write names no file.
    if error.filename is None:
        try:
            print(flush=True)
        except OSError:
            return "standard output"
    return error.filename


def printable(text: str) -> str:
    """Return the text on one line with control characters escaped: text quoted from a file could control a terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def tell_soon(reason: str, kind: str = "error") -> None:
    """Print `reason` on standard error, in one line that begins with `kind`. Returns after at most TELLING_SECONDS,
    even if the write still blocks (full pipe, paused terminal)."""
    line = f"\n{kind}: {printable(reason)}"  # on a line of its own, not behind a progress bar
    telling = threading.Thread(target=say_last, args=(line,), daemon=True)
    telling.start()
    telling.join(TELLING_SECONDS)


def say_last(text: str) -> None:
    """Print `text` on standard error, and make it the last text of torchrun's report on this rank."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    # The file's format is that of torch.distributed.elastic.multiprocessing.errors. torchrun reports the rank with the
    # earliest timestamp. Ranks that torchrun itself ends can have a timestamp of the same second, so this rank's
    # timestamp is set one second earlier.
    extra = {"py_callstack": f"\n\n{text.strip()}", "timestamp": str(int(time.time()) - 1)}
    content = json.dumps({"message": {"message": text.strip(), "extraInfo": extra}})
    with suppress(OSError):
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(content, encoding="utf-8")


def _mark_of_the_end() -> Path | None:
    """Return the path of the file that `end_for_good` writes, in the folder of this torchrun's logs, or None without
    torchrun. TORCHELASTIC_ERROR_FILE is attempt_N/LOCAL_RANK/error.json in this folder."""
    # TORCHELASTIC_ERROR_FILE alone is not enough, because a scheduler may set it, too.
    file = os.environ.get("TORCHELASTIC_ERROR_FILE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    return Path(file).parents[2] / "ended-for-good" if file else None


def end_for_good(status: int) -> None:
    """Make ranks that torchrun later restarts on this machine exit with `status`, by `exit_if_ended`."""
    # torchrun (--max-restarts) takes an orderly stop for a failure, because the exit status is not 0.
    if mark := _mark_of_the_end():
        with suppress(OSError):
            mark.write_text(str(status))


def exit_if_ended() -> None:
    """Exit with `status` if a rank on this machine called `end_for_good(status)` at an earlier start by torchrun."""
    is_again = launcher_number("TORCHELASTIC_RESTART_COUNT", 0) > 0
    if is_again and (mark := _mark_of_the_end()) and mark.exists():
        os._exit(int(mark.read_text() or 1))  # empty if another rank is writing it


# Signals that ask to stop, and output that nobody reads any more ----------------------------------------------------


@contextmanager
def signals_to(handler: Handler, numbers: Sequence[int] = STOPPING_SIGNALS) -> Iterator[None]:
    """Let `handler` handle the signals `numbers` until the end of the body, except those that this process ignores.
    Changes nothing outside the main thread, which alone can set handlers."""
    is_main = threading.current_thread() is threading.main_thread()
    taken = [number for number in numbers if is_main and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def handle_stopping_signals(handler: Handler) -> None:
    """Install `handler` for every signal that asks a run to stop, except for SIGHUP if this process ignores SIGHUP."""
    for number in STOPPING_SIGNALS:
        if number != signal.SIGHUP or not ignores_hangup():
            signal.signal(number, handler)


def interrupt_on_stopping_signals() -> None:
    """Let every signal that asks to stop, except an ignored SIGHUP, raise KeyboardInterrupt when it first arrives."""

    def interrupt(number: int, _: FrameType | None) -> None:
        EXIT.stop_signal = number
        signal.signal(number, signal.SIG_IGN)  # a closed terminal sends two SIGHUPs; ignore the second one
        raise KeyboardInterrupt

    handle_stopping_signals(interrupt)


def ignores_hangup() -> bool:
    """Return True if this process ignores SIGHUP, as under nohup, so that it outlives its terminal."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def described(signal_number: int) -> str:
    """Return the signal's name, and for SIGHUP also its possible causes."""
    name = signal.Signals(signal_number).name
    if signal_number != signal.SIGHUP:
        return name
    return f"{name} (the terminal, the launcher or the reader of the output is gone)"


class DetachableOutput(io.FileIO):
    """Stream for writing to a file descriptor. Once its reader or terminal is gone, it calls `when_gone` and drops all
    output from then on."""

    def __init__(self, descriptor: int, when_gone: Callable[[], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        # Error numbers of a write to a closed terminal and of a write to a pipe without a reader.
        self._signs = {errno.EIO} if self.isatty() else {errno.EPIPE}
        self._when_gone = when_gone

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self._signs:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())  # drops the output of C++ libraries, too
        os.close(nowhere)
        self._when_gone()
        return memoryview(data).nbytes


def survive_closed_output(when_gone: Callable[[], None]) -> None:
    """Replace standard output and standard error by streams that drop all output once they have no reader.

    Each stream that loses its reader calls `when_gone` once, in the thread that prints.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        # A failed write would end hours of training without a checkpoint.
        buffer = io.BufferedWriter(DetachableOutput(stream.fileno(), when_gone))
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True))
