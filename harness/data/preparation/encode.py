"""Pieces of documents to tokens: gathered into batches, each encoded by one of several processes, in the text's order.

The batches depend on the text alone, never on the number of workers: so does every token.

Threads of one process would do, since tiktoken lets go of the interpreter's lock; but two of them reached 0.6 of what
two processes do (docs/LOG.md): they wait for each other inside the library. A little text has one thread beside the
reader's, which starts at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np

from harness.common.errors import RunError, UserError
from harness.data.preparation.text_input import Piece
from harness.data.tokenizers.load import load_tokenizer
from harness.data.tokenizers.tokenizer import Tokenizer

BATCH_CHARACTERS = 2**20
BATCH_PIECES = 4096
LONGEST_PIECE = 2**20  # characters; longer texts are cut
CUT_SEARCH = 2**16  # characters before a piece's end in which a good place is looked for; without one it is cut anyway


@dataclass(frozen=True)
class Batch:
    """Pieces in their order, and where in the input they end."""

    pieces: list[Piece]
    file: int  # number of the file that is read next
    documents: int  # of that file that have been read by then, those without text too
    empty: int  # documents without text, in this batch
    position: int  # bytes of that file that have been read by then

    @property
    def is_whole(self) -> bool:
        """True if a document ends with the batch: work can be resumed from here."""
        return not self.pieces or self.pieces[-1].ends


def batches(pieces: Iterable[Piece], file: int = 0, documents: int = 0) -> Iterator[Batch]:
    """About a mebibyte of text at a time. Documents without any text are counted and left out.

    The pieces begin in `file`, of which `documents` have been read before. An empty piece of the next file that ends
    nothing tells that a file has ended.
    """
    gathered: list[Piece] = []
    characters = empty = position = 0
    is_open = False  # the document has had text
    for piece in _in_short_pieces(pieces):
        room = BATCH_CHARACTERS
        if piece.file != file:  # a good place to go on from, but many small files want to be one batch
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
    """Yield the text in pieces of at most LONGEST_PIECE characters, cut where every tokenizer here cuts it, too."""
    rest = ""
    for piece in pieces:
        if not piece.text and not piece.ends:  # it tells of a file's end
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
        else:  # the next piece may tell where this one can be cut
            rest = text


def _cutting_place(text: str, start: int, end: int) -> int:
    """The last place to cut up to `end`: before a space after something visible, since no pattern that splits text into
    words (GPT-2's, cl100k's, o200k's) has a word across that; before a line's end after a letter or a digit, likewise.
    Without one, `end` itself."""
    for at in range(end, max(start, end - CUT_SEARCH), -1):
        before, after = text[at - 1], text[at]
        if (after == " " and not before.isspace()) or (after in "\r\n" and before.isalnum()):
            return at
    return end


# Encoding ----------------------------------------------------------------------------------------------------------


Arrays = tuple[np.ndarray, np.ndarray]
Encoder = Callable[[list[tuple[str, bool]]], Future[Arrays]]  # `encode_texts` elsewhere


@dataclass(frozen=True)
class Encoded:
    """A batch as tokens; each document's last token is end-of-text."""

    batch: Batch
    tokens: np.ndarray  # (tokens,) of the dataset's dtype
    sizes: np.ndarray  # (pieces, 2) int64: tokens with end-of-text, UTF-8 bytes of text
    ends: np.ndarray  # (pieces,) bool: the document ends with the piece


def token_dtype(vocab_size: int) -> np.dtype:
    """The smaller of uint16 and uint32 that holds every token id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def encode_batches(batches: Iterable[Batch], encoder: Encoder, at_once: int) -> Iterator[Encoded]:
    """Encode the batches in order, `at_once` at a time, as many again waiting.

    The result does not depend on their number. Raises what reading the batches raises, after what came before it;
    RunError if encoding failed or a process is gone, UserError for what is wrong with tokenizer or text.
    """
    waiting: deque[tuple[Batch, Future[Arrays]]] = deque()

    def finished() -> Encoded:
        batch, future = waiting.popleft()
        return Encoded(batch, *future.result(), np.array([piece.ends for piece in batch.pieces], bool))

    source, failure = iter(batches), None
    try:
        while True:
            try:
                batch = next(source, None)
            except Exception as error:
                failure, batch = error, None
            if batch is None:
                break
            waiting.append((batch, encoder([(piece.text, piece.ends) for piece in batch.pieces])))
            if len(waiting) >= 2 * at_once:
                yield finished()
        while waiting:
            yield finished()
    except BrokenProcessPool:
        raise RunError(
            "a tokenizing process has ended by itself (out of memory?); to continue, run the same command again "
            "with fewer --workers"
        ) from None
    if failure:
        raise failure


def encode_texts(tokenizer: Tokenizer, texts: list[tuple[str, bool]]) -> Arrays:
    """The tokens and sizes of `Encoded`. A text comes with True if a document ends with it."""
    dtype = token_dtype(tokenizer.vocab_size)
    eot = np.array([tokenizer.eot_token], dtype)
    parts: list[np.ndarray] = []
    sizes = np.zeros((len(texts), 2), np.int64)
    for row, (text, ends) in enumerate(texts):
        tokens = tokenizer.encode_to_numpy(text)
        sizes[row] = len(tokens) + ends, len(text if text.isascii() else text.encode())
        parts += [tokens, eot] if ends else [tokens]
    return np.concatenate(parts or [eot[:0]], dtype=dtype, casting="unsafe"), sizes


# Processes ---------------------------------------------------------------------------------------------------------


@contextmanager
def encoder_processes(name_or_file: str | Path, count: int) -> Iterator[Encoder]:
    """Processes that encode with a tokenizer, and end with this one, however it ends; a thread in place of only one."""
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of libraries hold
    pool: Executor = ThreadPoolExecutor(1) if count == 1 else ProcessPoolExecutor(count, context, _begin)
    try:
        if count > 1:
            with _without_interrupts():
                for _ in range(count):
                    pool.submit(os.getpid)  # it starts a process
        yield lambda texts: pool.submit(_encode, name_or_file, texts)
    finally:
        pool.shutdown(cancel_futures=True)


def _encode(name_or_file: str | Path, texts: list[tuple[str, bool]]) -> Arrays:
    """`encode_texts` in one of the processes, with errors that can travel between them."""
    try:
        return encode_texts(_loaded(name_or_file), texts)
    except UserError:
        raise
    except BaseException as error:  # a library's panic is not an Exception
        raise RunError(
            f"tokenizing failed: {type(error).__name__}: {error}; correct the text or the tokenizer and run the same "
            "command again"
        ) from None


_loaded = cache(load_tokenizer)


def _begin() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what works in parallel
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that started it is killed: the pool's pipes are open in each of its processes,
    which would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


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
