"""Tokenizing in processes of their own.

Threads of one process would do, since tiktoken lets go of the interpreter's lock; but two of them reached 0.6 of what
two processes do (docs/LOG.md): they wait for each other inside the library.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.common.errors import RunError, UserError
from harness.data.preparation.batches import Batch
from harness.data.preparation.encoding import Encoded, encode_texts
from harness.data.tokenizers.load import load_tokenizer

ENDING_SECONDS = 5.0


class EncoderProcesses:
    """Some processes with the same tokenizer, each of which encodes one batch at a time."""

    def __init__(self, name_or_file: str | Path, count: int) -> None:
        self.count = count
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of libraries hold
        self._idle: queue.SimpleQueue[tuple[Connection, multiprocessing.process.BaseProcess]] = queue.SimpleQueue()
        self._processes: list[tuple[Connection, multiprocessing.process.BaseProcess]] = []
        with _without_interrupts():
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, name_or_file), daemon=True)
                process.start()
                theirs.close()  # so that either side sees the end of the other
                self._processes.append((ours, process))
                self._idle.put((ours, process))

    def encode(self, batch: Batch) -> Encoded:
        """Have an idle process encode the batch; any thread can ask. Raises RunError if the process is gone, and
        with the reason if encoding failed there; UserError for what is wrong with tokenizer or text."""
        connection, process = self._idle.get()
        try:
            connection.send([(piece.text, piece.ends) for piece in batch.pieces])
            answer = connection.recv()
        except (EOFError, OSError):
            process.join(ENDING_SECONDS)
            raise RunError(
                f"a tokenizing process has ended by itself (exit status {process.exitcode}; -9: for want of memory?); "
                "the same command goes on from there, --workers with fewer"
            ) from None
        finally:
            self._idle.put((connection, process))
        if isinstance(answer, Exception):
            raise answer
        return Encoded(batch, *answer)

    def __enter__(self) -> EncoderProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, _process in self._processes:
            connection.close()
        for _connection, process in self._processes:
            process.join(ENDING_SECONDS)
            if process.is_alive():
                process.kill()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started meanwhile leave Ctrl-C, which reaches all of a terminal's, to the one that started them: they
    inherit that it is blocked. Here it is noted, by whichever thread it comes, and waits until the end: a process that
    is half started would complain."""
    noted: list[int] = []
    resource_tracker.ensure_running()  # it would be started with the first process, and unblock signals then
    handler = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if noted:
        raise KeyboardInterrupt


def _work(connection: Connection, name_or_file: str | Path) -> None:
    """Encode what comes until the other side is gone, however it went."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what works in parallel
    tokenizer = _attempt(load_tokenizer, name_or_file)
    with suppress(EOFError, OSError):
        while True:
            texts = connection.recv()
            failed = isinstance(tokenizer, Exception)
            connection.send(tokenizer if failed else _attempt(encode_texts, texts, tokenizer))


def _attempt(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `work`, or the exception to be raised on the other side."""
    try:
        return work(*arguments)
    except UserError as error:
        return error
    except BaseException as error:  # a library's panic is not an Exception
        return RunError(
            f"tokenizing failed: {type(error).__name__}: {error}; mend the text or the tokenizer, and the same command "
            "goes on from there"
        )
