"""Text batches to tokens, many at a time, in the order of the text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from harness.data.preparation.batches import Batch
from harness.data.tokenizers.tokenizer import Tokenizer


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
