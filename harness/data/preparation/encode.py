"""Pieces of documents to tokens: gathered into batches, each encoded by one of several processes, in the text's order.

The batches depend on the text alone, never on the number of workers: so does every token.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Encoded:
    """A batch as tokens; each document's last token is end-of-text."""

    batch: Batch
    tokens: np.ndarray  # (tokens,) of the dataset's dtype
    sizes: np.ndarray  # (pieces, 2) int64: tokens with end-of-text, UTF-8 bytes of text
    ends: np.ndarray  # (pieces,) bool: the document ends with the piece


def encode_batches(batches: Iterable[Batch], encode: Callable[[Batch], Encoded], at_once: int) -> Iterator[Encoded]:
    """`encode` each batch, `at_once` of them in threads, as many again waiting.

    What comes out does not depend on their number. Raises what reading the batches raises, after what came before it.
    """
    waiting: deque[Future[Encoded]] = deque()
    source = iter(batches)
    with ThreadPoolExecutor(at_once, thread_name_prefix="tokenizer") as pool:
        try:
            while True:
                try:
                    batch = next(source, None)
                except Exception:
                    while waiting:
                        yield waiting.popleft().result()
                    raise
                if batch is not None:
                    waiting.append(pool.submit(encode, batch))
                if batch is None and not waiting:
                    return
                if batch is None or len(waiting) >= 2 * at_once:
                    yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def encode(batch: Batch, tokenizer: Tokenizer) -> Encoded:
    """One batch, here and now."""
    return Encoded(batch, *encode_texts([(piece.text, piece.ends) for piece in batch.pieces], tokenizer))


def encode_texts(texts: list[tuple[str, bool]], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens, sizes and ends of `Encoded`. Of each text it says whether a document ends with it."""
    dtype = token_dtype(tokenizer.vocab_size)
    eot = np.array([tokenizer.eot_token], dtype)
    parts: list[np.ndarray] = []
    sizes = np.zeros((len(texts), 2), np.int64)
    for row, (text, ends) in enumerate(texts):
        tokens = tokenizer.encode_to_numpy(text)
        sizes[row] = len(tokens) + ends, len(text if text.isascii() else text.encode())
        parts += [tokens, eot] if ends else [tokens]
    ends_ = np.array([ends for _, ends in texts], bool)
    return np.concatenate(parts or [eot[:0]], dtype=dtype, casting="unsafe"), sizes, ends_


def token_dtype(vocab_size: int) -> np.dtype:
    """The smaller of uint16 and uint32 that holds every token id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


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
