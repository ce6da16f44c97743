"""Every tokenizer behind one small interface: GPT-2's, other encodings of tiktoken, and trained byte-level BPEs."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from harness.common.errors import UserError

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """Text to token ids and back without loss.

    Special tokens named inside a text are ordinary text: else a page about GPT-2 would end where it says <|endoftext|>,
    and anybody's text could end a document. The lab notebook's program takes them for the special ones.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        eot_token: int,
        special_tokens: Collection[int],
        encode: Callable[[str], np.ndarray],
    ) -> None:
        """`token_bytes[i]` is what token `i` decodes to; `special_tokens` stand for no text; `load_tokenizer` calls."""
        self.vocab_size = len(token_bytes)
        self.eot_token = eot_token
        self._token_bytes = token_bytes
        self._special_tokens = special_tokens
        self._encode = encode

    def encode(self, text: str) -> list[int]:
        """Raises UserError for a lone surrogate, which has no UTF-8."""
        return self.encode_to_numpy(text).tolist()

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """`encode` as (tokens,) uint32. Threads can do it at the same time: most of it runs without Python's lock."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"text is not valid Unicode: character {error.start} is half of a surrogate pair") from None
        return self._encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with U+FFFD where a cut left part of a character.

        Raises UserError for an id that is not in the vocabulary.
        """
        try:
            return b"".join([self._token_bytes[_not_negative(token)] for token in tokens]).decode(errors="replace")
        except IndexError:
            raise UserError(f"token ids must be between 0 and {self.vocab_size - 1} to be decoded") from None

    def decode_stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """`decode`, piece by piece: a character is yielded with the token that completes it."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            yield decoder.decode(self._token_bytes[_not_negative(token)])
        yield decoder.decode(b"", final=True)

    def token_byte_lengths(self) -> np.ndarray:
        """(vocab_size,) int64: the bytes of text each token stands for; end-of-text and other special tokens: 0."""
        lengths = np.array([len(text) for text in self._token_bytes], dtype=np.int64)
        lengths[list(self._special_tokens)] = 0
        return lengths


def _not_negative(token: int) -> int:
    if token < 0:
        raise IndexError
    return token
