"""Encode pieces of documents as tokens, in batches, by several processes. The tokens do not depend on the number of
processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

import numpy as np

from harness.common.errors import EXIT, STOPPING_SIGNALS, RunError, UserError, signals_to
from harness.common.processes import end_with_parent
from harness.data.preparation.text_input import Piece
from harness.data.tokenizers import Tokenizer, load_tokenizer

BATCH_CHARACTERS = 2**20
BATCH_PIECES = 4096
LONGEST_PIECE = 2**20  # characters; longer texts are cut
CUT_SEARCH = 2**16  # characters at the end of a piece among which a place to cut, between words, is looked for


@dataclass(frozen=True)
class Batch:
    """Consecutive pieces of the text, and the position in the input where they end."""

    pieces: list[Piece]
    file: int  # number of the file that is read next
    documents: int  # documents of `file` that have been read at the batch's end, including those without text
    empty: int  # documents without text in this batch
    position: int  # bytes of `file` that have been read at the batch's end


def batches(pieces: Iterable[Piece], file: int = 0, documents: int = 0) -> Iterator[Batch]:
    """Gather `pieces` into batches. Documents without any text are counted and left out. The last batch may have no
    pieces.

    - `pieces`: a piece with no text and with `ends` False marks the end of a file. Its `file` is the next file's
      number.
    - `file`: number of the first piece's file.
    - `documents`: number of documents before the first piece in that file.
    """
    gathered: list[Piece] = []
    characters = empty = position = 0
    is_open = False  # True if text of the current document has been gathered
    for piece in _in_short_pieces(pieces):
        room = BATCH_CHARACTERS
        if piece.file != file:  # end the batch here if it is not tiny: interrupted work resumes from the end of a batch
            file, documents, room = piece.file, 0, BATCH_CHARACTERS // 16
        position = piece.position
        documents += piece.ends
        if piece.ends and not piece.text and not is_open:
            empty += 1
        elif piece.text or piece.ends:
            gathered.append(piece)
            characters += len(piece.text)
            is_open = not piece.ends
        if characters >= room or len(gathered) >= BATCH_PIECES:
            yield Batch(gathered, file, documents, empty, position)
            gathered, characters, empty = [], 0, 0
    yield Batch(gathered, file, documents, empty, position)


def _in_short_pieces(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the text of `pieces` in pieces of at most LONGEST_PIECE characters. Only longer documents are cut, if
    possible between words."""
    rest = ""
    for piece in pieces:
        if not piece.text and not piece.ends:  # the piece marks the end of a file
            yield piece
            continue
        text, rest = rest + piece.text, ""
        start = 0
        while len(text) - start > LONGEST_PIECE:
            end = _cutting_place(text, start, start + LONGEST_PIECE)
            yield piece._replace(text=text[start:end], ends=False)
            start = end
        text = text[start:] if start else text
        if piece.ends:
            yield piece._replace(text=text)
        else:  # the piece may end inside a word, so join its rest with the next piece
            rest = text


def _cutting_place(text: str, start: int, end: int) -> int:
    """Return the index at which to cut `text` between words: the largest one after `start` and up to `end`. If there is
    none among the last CUT_SEARCH characters, return `end`."""
    # The patterns that split text into words in GPT-2, cl100k and o200k find no word that extends across such a place,
    # so cutting the text before it does not change the tokens.
    for at in range(end, max(start, end - CUT_SEARCH), -1):
        before, after = text[at - 1], text[at]
        if (after == " " and not before.isspace()) or (after in "\r\n" and before.isalnum()):
            return at
    return end


# Encoding ----------------------------------------------------------------------------------------------------------


Arrays = tuple[np.ndarray, np.ndarray]
Encoder = Callable[[list[tuple[str, bool]]], Future[Arrays]]  # runs `encode_texts` in another process or thread


@dataclass(frozen=True)
class Encoded:
    """Batch encoded as tokens. The last token of each document is end-of-text."""

    batch: Batch
    tokens: np.ndarray  # (tokens,) of the dataset's dtype
    sizes: np.ndarray  # (pieces, 2) int64: tokens with end-of-text, UTF-8 bytes of text
    ends: np.ndarray  # (pieces,) bool: the document ends with the piece
    left_out: int = 0  # documents that begin in the batch and are not here because they occur in a held-out split


def encode_batches(batches: Iterable[Batch], encoder: Encoder, workers: int) -> Iterator[Encoded]:
    """Yield the encoded batches in order. `workers` is the number of processes or threads of `encoder`.

    If reading `batches` raises an error, the batches before the error are yielded first. Raises the errors of
    `encode_texts`, and BrokenProcessPool if a process dies.
    """
    waiting: deque[tuple[Batch, Future[Arrays]]] = deque()

    def finished() -> Encoded:
        batch, future = waiting.popleft()
        return Encoded(batch, *future.result(), np.array([piece.ends for piece in batch.pieces], bool))

    source, failure = iter(batches), None
    while True:
        try:
            batch = next(source, None)
        except Exception as error:
            failure, batch = error, None
        if batch is None:
            break
        waiting.append((batch, encoder([(piece.text, piece.ends) for piece in batch.pieces])))
        if len(waiting) >= 2 * workers:  # a worker that has encoded a batch finds another one waiting
            yield finished()
    while waiting:
        yield finished()
    if failure:
        raise failure


def encode_texts(tokenizer: Tokenizer | str | Path, texts: list[tuple[str, bool]]) -> Arrays:
    """Encode the texts, and return the fields `tokens` and `sizes` of `Encoded`. Each entry of `texts` is (text, ends),
    where `ends` is True if the text ends a document. Raises only UserError and RunError, which can be sent to another
    process."""
    try:
        tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else _loaded(tokenizer)
        eot = np.array([tokenizer.eot_token], tokenizer.dtype)
        parts: list[np.ndarray] = []
        sizes = np.zeros((len(texts), 2), np.int64)
        for row, (text, ends) in enumerate(texts):
            tokens = tokenizer.encode_to_numpy(text)
            sizes[row] = len(tokens) + ends, len(text if text.isascii() else text.encode())
            parts += [tokens, eot] if ends else [tokens]
        return np.concatenate(parts or [eot[:0]], dtype=eot.dtype, casting="unsafe"), sizes
    except UserError:
        raise
    except BaseException as error:  # a panic of a Rust library is not an Exception
        raise RunError(
            f"tokenizing failed: {type(error).__name__}: {error}; correct the cause and {EXIT.again}"
        ) from None


_loaded = cache(load_tokenizer)


# Processes ---------------------------------------------------------------------------------------------------------


@contextmanager
def encoder_processes(count: int) -> Iterator[Executor]:
    """Yield an executor that runs `encode_texts` in `count` processes, or in a thread if `count` is 1.

    The processes end with this process, even if this process is killed. Raises RunError if one of the processes dies.
    The caller must have no other processes of multiprocessing.
    """
    context = multiprocessing.get_context("spawn")  # fork would copy locks that threads of libraries hold
    # For a small text, one thread encodes while the main thread reads, because a thread starts faster than a process.
    # Two threads reached at most 0.6 of the speed of two processes (docs/LOG.md), because threads wait for each other
    # inside tiktoken.
    pool: Executor = ThreadPoolExecutor(1)  # starts a thread when it is used
    try:
        if count > 1:
            with _without_interrupts():
                pool = ProcessPoolExecutor(count, context, _initialize_process)
                # private: `submit` starts no process while another is idle
                pool._launch_processes()  # type: ignore[attr-defined]
                pool.submit(os.getpid)  # starts the pool's thread
            # A process that dies while it writes a result leaves a part of the result in the pool's pipe. The pool
            # waits for the rest while any process has the pipe's writing end open. Therefore, this process closes its
            # writing end, and a thread ends the other processes. (Private: nothing public closes this end.)
            pool._result_queue._writer.close()  # type: ignore[attr-defined]
            Thread(target=_end_together, args=(multiprocessing.active_children(),), daemon=True).start()
        yield pool
    except BaseException as error:
        # When a process dies, the pool ends the other processes and waits for them. But it does not end a process that
        # it is starting.
        for process in multiprocessing.active_children():
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise RunError(
                "a tokenizing process ended unexpectedly (killed for lack of memory?); to continue, "
                f"{EXIT.again} with fewer --workers"
            ) from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_together(processes: list[BaseProcess]) -> None:
    """Wait until one of the processes has ended, then end the others."""
    wait([process.sentinel for process in processes])
    for process in processes:
        process.terminate()


def _initialize_process() -> None:
    """Keep the library `tokenizers` from starting threads in this process of the pool, and end the process with its
    parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already run in parallel
    end_with_parent()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Delay STOPPING_SIGNALS in this process until the end of the `with` body. The processes that the body starts block
    these signals, except SIGTERM."""
    noted: list[int] = []
    # A terminal sends its signals to all of its processes, but only this process should handle them. A signal during
    # the start of a process would interrupt it, and the half-started process would print an error. The pool ends its
    # processes by SIGTERM.
    blocked = set(STOPPING_SIGNALS) - {signal.SIGTERM}
    with signals_to(lambda number, _: noted.append(number)):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            resource_tracker.ensure_running()  # if the pool started the tracker, SIGINT would be unblocked
            signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if noted:
        signal.raise_signal(noted[0])
