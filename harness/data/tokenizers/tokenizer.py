"""Common interface of all tokenizers: GPT-2's, other encodings of tiktoken, and trained byte-level BPEs."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from harness.common.errors import UserError

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """Tokenizer that converts text to token ids and back without loss.

    The name of a special token inside a text is encoded as ordinary text. Otherwise a page about GPT-2 would end at its
    first <|endoftext|>, and the author of any text could end a document. Unlike this class, the training program of
    Giles Thomas's lab notebook (harness/runs/upstream.py) encodes such a name as the special token.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        eot_token: int,
        special_tokens: Collection[int],
        encode: Callable[[str], np.ndarray],
        place: str | Path,
    ) -> None:
        """Store the vocabulary: token `i` decodes to `token_bytes[i]`. The ids in `special_tokens` stand for no
        text: `token_byte_lengths` is 0 for them. `place` is the name or the file from which `load_tokenizer` loaded the
        tokenizer."""
        self.vocab_size = len(token_bytes)
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)  # dtype of the tokens in a dataset
        self.eot_token = eot_token
        self._token_bytes = token_bytes
        self._special_tokens = special_tokens
        self._encode = encode
        self.place = place

    def has_tokens_of(self, other: Tokenizer) -> bool:
        """Return True if every token id stands for the same bytes in both tokenizers."""
        return self.eot_token == other.eot_token and list(self._token_bytes) == list(other._token_bytes)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. Raises UserError for a lone surrogate, which UTF-8 cannot encode."""
        return self.encode_to_numpy(text).tolist()

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """Return the token ids of a text as (tokens,) uint32. Threads can encode in parallel, because most of the work
        runs without the GIL. Raises UserError like `encode`."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"text is not valid Unicode: character {error.start} is half of a surrogate pair") from None
        return self._encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`. A character of which only some bytes are among the tokens becomes U+FFFD.

        Raises UserError for an id that is not in the vocabulary.
        """
        if any(not 0 <= token < self.vocab_size for token in tokens):
            raise UserError(f"token ids must be between 0 and {self.vocab_size - 1} to be decoded")
        return b"".join([self._token_bytes[token] for token in tokens]).decode(errors="replace")

    def decode_stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of each token in turn. If a character consists of several tokens, it is yielded with the last
        of them. An incomplete character at the end is yielded as U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            yield decoder.decode(self._token_bytes[token])
        yield decoder.decode(b"", final=True)

    def token_byte_lengths(self) -> np.ndarray:
        """Return the number of bytes of text per token, (vocab_size,) int64. The number is 0 for end-of-text and other
        special tokens."""
        lengths = np.array([len(text) for text in self._token_bytes], dtype=np.int64)
        lengths[list(self._special_tokens)] = 0
        return lengths
