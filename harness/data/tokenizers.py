"""Tokenizers, which convert text to token ids and back: GPT-2's and other encodings of tiktoken, and byte-level BPEs in
a tokenizer.json, which this module can also train."""

from __future__ import annotations

import base64
import codecs
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.common.errors import UserError, os_errors_as

END_OF_TEXT = "<|endoftext|>"
LONGEST_WORD = 2**14  # bytes, when a tokenizer is trained
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>")  # the second name is Llama 3's
TIKTOKEN_SUFFIX = ".tiktoken.json"
# Text that a lossy tokenizer would change: white space, combining marks and ligatures (normalization), the name of the
# special token, and characters that have all bytes of UTF-8 among them.
ALL_BYTES = "".join(map(chr, [*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000)]))
ROUND_TRIP_PROBE = f"x  a  b\r\n\tE\u0301 \ufb01 日本 \U0001f40d {END_OF_TEXT} {ALL_BYTES} "


@dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """Tokenizer that converts text to token ids and back without loss. The name of a special token inside a text is
    encoded as ordinary text."""

    token_bytes: list[bytes]  # of each token id
    eot_token: int
    special_tokens: Collection[int]  # ids of all special tokens, including end-of-text, which do not count as text
    encoder: Callable[[str], np.ndarray]  # returns the token ids of a text as (tokens,) uint32
    place: str | Path  # name or file from which the tokenizer was loaded

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tokens in a dataset."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def has_tokens_of(self, other: Tokenizer) -> bool:
        """Return True if every token id decodes to the same bytes in both tokenizers, and both have the same
        end-of-text token."""
        return self.eot_token == other.eot_token and self.token_bytes == other.token_bytes

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. Raises UserError if the text has a lone surrogate."""
        return self.encode_to_numpy(text).tolist()

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """Return the token ids of a text as (tokens,) uint32. Most of the work runs without the GIL. Raises UserError
        like `encode`."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            text = f"character {error.start} is half of a surrogate pair; remove it"
            raise UserError(f"text is not valid Unicode: {text}") from None
        return self.encoder(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`. Bytes that are not valid UTF-8 become U+FFFD. Raises UserError for an id that is
        not in the vocabulary."""
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise UserError(f"token id {token} cannot be decoded: it must be between 0 and {self.vocab_size - 1}")
        return b"".join([self.token_bytes[token] for token in tokens]).decode(errors="replace")

    def decode_stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of each token in turn, and at the end one more text, for an unfinished character. A character
        of several tokens is yielded with its last token. Invalid UTF-8 becomes U+FFFD. Every id must be in the
        vocabulary."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            yield decoder.decode(self.token_bytes[token])
        yield decoder.decode(b"", final=True)

    def token_byte_lengths(self) -> np.ndarray:
        """Return the number of bytes of each token's text, (vocab_size,) int64. It is 0 for special tokens."""
        lengths = np.array([len(text) for text in self.token_bytes], dtype=np.int64)
        lengths[list(self.special_tokens)] = 0
        return lengths


def load_tokenizer(name_or_file: str | Path) -> Tokenizer:
    """Return GPT-2's tokenizer for "gpt2", otherwise the tokenizer in a file.

    - For "gpt2", the vocabulary is downloaded if it is not on this machine.
    - A file whose name ends in TIKTOKEN_SUFFIX has the contents that `encoding_file` returns.
    - Any other file is the tokenizer.json of a byte-level BPE.

    Raises UserError if the tokenizer cannot be obtained, has no end-of-text token, or is not lossless.
    """
    if name_or_file == "gpt2":
        return load_encoding("gpt2")
    path = Path(name_or_file)
    tokenizer = load_encoding(path) if path.name.endswith(TIKTOKEN_SUFFIX) else load_bpe(path)
    if tokenizer.decode(tokenizer.encode(ROUND_TRIP_PROBE)) != ROUND_TRIP_PROBE:
        raise UserError(
            f"{path}: decoding does not give back the encoded text; use a byte-level BPE that has all bytes, no "
            "normalizer and no prefix space"
        )
    return tokenizer


# Encodings of tiktoken: GPT-2's by its name, others from a file in the dataset's folder ------------------------------


def load_encoding(name_or_file: str | Path) -> Tokenizer:
    """Return the tokenizer of a tiktoken encoding. A str is the encoding's name; a Path is a file with the text that
    `encoding_file` returns."""
    encoding = read_encoding(name_or_file)
    special = encoding._special_tokens
    if END_OF_TEXT not in special:
        raise UserError(f"{name_or_file}: has no {END_OF_TEXT} token, which separates documents; use another encoding")
    token_bytes = [b""] * encoding.n_vocab  # stays empty for the unused ids of some encodings
    for token, rank in encoding._mergeable_ranks.items():
        token_bytes[rank] = token
    for text, rank in special.items():
        token_bytes[rank] = text.encode()

    def encode(text: str) -> np.ndarray:
        # Special tokens' names are encoded as ordinary text. Otherwise the author of any text could end a document.
        return encoding.encode_to_numpy(text, disallowed_special=())

    return Tokenizer(token_bytes, special[END_OF_TEXT], set(special.values()), encode, name_or_file)


def load_gpt2_offline() -> Tokenizer | None:
    """Return GPT-2's tokenizer, or None if its vocabulary is not on this machine. While this runs, no other thread can
    download a vocabulary."""
    import tiktoken.load

    def refuse(blobpath: str) -> bytes:
        raise ConnectionError(blobpath)

    download = tiktoken.load.read_file
    tiktoken.load.read_file = refuse
    try:
        return load_encoding("gpt2")
    except UserError:
        return None
    finally:
        tiktoken.load.read_file = download


def encoding_file(name: str) -> str:
    """Return the tiktoken encoding `name` as text to write to a file for `load_tokenizer`. Raises UserError if the
    vocabulary can be neither found nor downloaded."""
    encoding = read_encoding(name)
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    content = {
        "name": name,
        "pattern": encoding._pat_str,
        "special_tokens": encoding._special_tokens,
        "ranks": {base64.b64encode(token).decode(): rank for token, rank in ranks},
    }
    return json.dumps(content, indent=0) + "\n"


def read_encoding(name_or_file: str | Path) -> Any:
    """Return a tiktoken.Encoding. A str is the encoding's name; a Path is a file with the text that `encoding_file`
    returns. Raises UserError if the encoding cannot be read."""
    import tiktoken

    try:
        if isinstance(name_or_file, str):
            return tiktoken.get_encoding(name_or_file)
        content = json.loads(name_or_file.read_text(encoding="utf-8"))
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in content["ranks"].items()}
        special = {str(token): int(rank) for token, rank in content["special_tokens"].items()}
        return tiktoken.Encoding(
            str(content["name"]), pat_str=str(content["pattern"]), mergeable_ranks=ranks, special_tokens=special
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # Quote only `strerror`: errors of requests are OSErrors, too, and their messages are very long.
        reason = getattr(error, "strerror", None)
        if isinstance(name_or_file, Path):
            damage = f"not an encoding of tiktoken as prepare_datasets.py writes it: {str(error)[:100]}"
            raise UserError(f"{name_or_file}: {reason or damage}; put back the original file") from None
        folder = os.environ.get("TIKTOKEN_CACHE_DIR")
        where = f"in TIKTOKEN_CACHE_DIR={folder}" if folder else "on this machine (TIKTOKEN_CACHE_DIR is not set)"
        what = "GPT-2's vocabulary" if name_or_file == "gpt2" else f"the vocabulary of {name_or_file}"
        raise UserError(
            f"{what} is not {where} and cannot be downloaded ({reason or type(error).__name__}); connect to the "
            "network once, or set TIKTOKEN_CACHE_DIR to a folder filled by tiktoken on another machine"
        ) from None


# Byte-level BPEs in a tokenizer.json ---------------------------------------------------------------------------------


def load_bpe(path: Path) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json. Raises UserError if it cannot be read, has no end-of-text token, or has
    a token that a byte-level BPE cannot have."""
    import tokenizers

    with os_errors_as(UserError, str(path)):
        content = path.read_bytes()
    try:
        backend: Any = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises nothing more precise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not a readable tokenizer file: {reason}; give an undamaged tokenizer.json") from None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # despite this name, encodes special tokens' names as ordinary text
    name = next((name for name in ENDS_OF_TEXT if backend.token_to_id(name) is not None), None)
    if name is None:
        raise UserError(f"{path}: has no {' or '.join(ENDS_OF_TEXT)} token; use a tokenizer that has one of them")
    # The file may list end-of-text as an ordinary token. Its name inside a text would then end the document.
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False)])

    def encode(text: str) -> np.ndarray:
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)  # "fast": without offsets
        return np.array(encoding.ids, np.uint32)

    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    byte_of = {character: byte for byte, character in character_of_byte().items()}
    token_bytes = [b""] * (max(vocabulary.values()) + 1)
    for text, token in vocabulary.items():
        try:
            token_bytes[token] = text.encode() if token in added else bytes([byte_of[character] for character in text])
        except KeyError:
            raise UserError(
                f"{path}: not a byte-level BPE, because token {token} is {text!r}; use another tokenizer.json"
            ) from None
    special = {token for token, each in added.items() if each.special}
    return Tokenizer(token_bytes, vocabulary[name], special, encode, path)


def character_of_byte() -> dict[int, str]:
    """Return a dict from each byte to the character that stands for it in a tokenizer.json, as defined by GPT-2."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def train_bpe(texts: Iterator[str], vocab_size: int, path: Path, special_tokens: Sequence[str] = ()) -> None:
    """Train a byte-level BPE with exactly `vocab_size` tokens, and save it as a tokenizer.json at `path`.

    - Token 0 is end-of-text, and the next ones are `special_tokens`.
    - `vocab_size` must be at least 257 plus the number of `special_tokens`.
    - The same texts give the same file.

    Raises UserError if the text is too small for so many tokens, or if an ordinary token is spelt like a special token.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend: Any = Backend(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Training takes time quadratic in the longest word (an encoded image, for example), and cannot be interrupted.
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LONGEST_WORD)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.pre_tokenizer = words
    reached = backend.get_vocab_size()
    if reached != vocab_size:
        raise UserError(
            f"the text is too small or too uniform for a vocabulary of {vocab_size} tokens: give more text, more "
            f"varied text, or a --train-tokenizer of at most {reached}"
        )
    # A learned token or a byte that is spelt like a special token gets that token's id.
    merges = json.loads(backend.to_str())["model"]["merges"]
    learned = {*pre_tokenizers.ByteLevel.alphabet(), *map("".join, merges)}
    if taken := [name for name in special_tokens if name in learned]:
        raise UserError(
            f"--special-token {taken[0]}: is also an ordinary token, which would be encoded as the special one; "
            "give a name such as <|user|>"
        )
    path.write_text(backend.to_str(pretty=True) + "\n", encoding="utf-8")
