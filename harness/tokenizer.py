"""GPT-2's tokenizer and trained byte-level BPEs behind one small interface.

tiktoken and tokenizers are imported where they are used: a command's --help needs neither.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UserError

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte, and end-of-text
# What a tokenizer that loses or changes text trips over: white space, combining marks and ligatures (normalisation),
# text of other alphabets, and the name of the special token.
ROUND_TRIP_PROBE = f"x  a  b\r\n\tE\u0301 \ufb01 日本 \U0001f40d\x00 {END_OF_TEXT} "


class Tokenizer:
    """Text to token ids and back without loss. Special tokens named inside a text are ordinary text."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        eot_token: int,
        special_tokens: Collection[int],
        encode_batch: Callable[[Sequence[str]], list[list[int]]],
    ) -> None:
        """`token_bytes[i]` is what token `i` decodes to; `special_tokens` stand for no text; `load_tokenizer` calls."""
        self.vocab_size = len(token_bytes)
        self.eot_token = eot_token
        self._token_bytes = token_bytes
        self._special_tokens = special_tokens
        self._encode_batch = encode_batch

    def encode(self, text: str) -> list[int]:
        """Raises UserError for a lone surrogate, which has no UTF-8."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts, on all cores."""
        for text in texts:
            _check_unicode(text)
        return self._encode_batch(texts)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with U+FFFD where a cut left part of a character.

        Raises UserError for an id that is not in the vocabulary.
        """
        try:
            return b"".join([self._token_bytes[_not_negative(token)] for token in tokens]).decode(errors="replace")
        except IndexError:
            raise UserError(f"token ids must be between 0 and {self.vocab_size - 1} to be decoded") from None

    def token_byte_lengths(self) -> np.ndarray:
        """(vocab_size,) int64: the bytes of text each token stands for; end-of-text and other special tokens: 0."""
        lengths = np.array([len(text) for text in self._token_bytes], dtype=np.int64)
        lengths[list(self._special_tokens)] = 0
        return lengths


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"text is not valid Unicode: character {error.start} is half of a surrogate pair") from None


def _not_negative(token: int) -> int:
    if token < 0:
        raise IndexError
    return token


def load_tokenizer(name_or_file: str | Path) -> Tokenizer:
    """GPT-2's tokenizer for "gpt2", else the byte-level BPE in a tokenizer.json.

    Raises UserError if GPT-2's vocabulary cannot be had, or the file is missing, damaged or loses text.
    """
    return _load_gpt2() if name_or_file == "gpt2" else _load_file(Path(name_or_file))


def _load_gpt2() -> Tokenizer:
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong checksum is a ValueError
        folder = os.environ.get("TIKTOKEN_CACHE_DIR")
        where = f"in TIKTOKEN_CACHE_DIR={folder}" if folder else "on this machine (TIKTOKEN_CACHE_DIR is not set)"
        raise UserError(
            f"GPT-2's vocabulary is not {where} and cannot be downloaded ({_reason(error)}); connect to the network "
            "once, or set TIKTOKEN_CACHE_DIR to a folder filled by tiktoken on another machine"
        ) from None
    eot = encoding.eot_token
    token_bytes = [encoding.decode_single_token_bytes(token) for token in range(encoding.n_vocab)]

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        if len(texts) == 1:  # no thread pool for a prompt
            return [encoding.encode_ordinary(texts[0])]
        return encoding.encode_ordinary_batch(list(texts), num_threads=os.cpu_count() or 1)

    return Tokenizer(token_bytes, eot, {eot}, encode_batch)


def _reason(error: Exception) -> str:
    """A few words: requests' own messages are paragraphs."""
    return getattr(error, "strerror", None) or type(error).__name__


def _load_file(path: Path) -> Tokenizer:
    backend = _read_backend(path)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # that is: as text
    eot = backend.token_to_id(END_OF_TEXT)
    if eot is None:
        raise UserError(f"{path}: has no {END_OF_TEXT} token; use a tokenizer trained by this tool")

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    special = {token for token, added in backend.get_added_tokens_decoder().items() if added.special}
    tokenizer = Tokenizer(_bytes_of_tokens(backend, path), eot, special, encode_batch)
    if tokenizer.decode(tokenizer.encode(ROUND_TRIP_PROBE)) != ROUND_TRIP_PROBE:
        raise UserError(
            f"{path}: decoding does not give back the encoded text; only byte-level BPEs without a prefix do"
        )
    return tokenizer


def _read_backend(path: Path) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except Exception as error:  # the library raises nothing more precise
        raise UserError(f"{path}: not a readable tokenizer file: {' '.join(str(error).split())[:200]}") from None


def _bytes_of_tokens(backend: Any, path: Path) -> list[bytes]:
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    byte_of = _byte_of_character()
    token_bytes = [b""] * (max(vocabulary.values()) + 1)
    for text, token in vocabulary.items():
        try:
            token_bytes[token] = text.encode() if token in added else bytes([byte_of[character] for character in text])
        except KeyError:
            raise UserError(f"{path}: not a byte-level BPE: token {token} is {text!r}") from None
    return token_bytes


def _byte_of_character() -> dict[str, int]:
    """The inverse of GPT-2's way to write bytes: a printable Latin-1 character stands for itself, and the others, in
    order, are the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def train_bpe(texts: Iterator[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE with exactly `vocab_size` tokens, end-of-text being token 0, and save it as `path`.

    Pieces are those of GPT-2 (no merges across words), and the same texts give the same file. Raises UserError if the
    texts are too few for so many tokens.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(f"a byte-level vocabulary needs at least {SMALLEST_VOCABULARY} tokens, not {vocab_size}")
    backend: Any = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    reached = backend.get_vocab_size()
    if reached != vocab_size:
        raise UserError(f"the text gives a vocabulary of {reached} tokens, not {vocab_size}; ask for {reached} or less")
    try:
        path.write_text(backend.to_str(pretty=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
