"""Byte-level BPEs in a tokenizer.json: loading, and training on text.

The library `tokenizers` is imported where it is used, because a command's --help does not need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harness.common.errors import UserError
from harness.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer

ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>")  # the second name is Llama 3's
SMALLEST_VOCABULARY = 257  # every byte, and end-of-text


def load_file(path: Path) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json. Raises UserError if the file is missing, damaged or not a byte-level
    BPE."""
    import tokenizers

    try:
        backend: Any = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except Exception as error:  # the library raises nothing more precise
        raise UserError(f"{path}: not a readable tokenizer file: {' '.join(str(error).split())[:200]}") from None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # encodes their names as ordinary text, despite the option's name
    eot = next((token for name in ENDS_OF_TEXT if (token := backend.token_to_id(name)) is not None), None)
    if eot is None:
        raise UserError(f"{path}: has no {END_OF_TEXT} token; use a tokenizer trained by this tool")

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
            raise UserError(f"{path}: not a byte-level BPE: token {token} is {text!r}") from None
    return Tokenizer(token_bytes, eot, {token for token, each in added.items() if each.special}, encode, path)


def character_of_byte() -> dict[int, str]:
    """Return a dict from each byte to the character that stands for it in a tokenizer.json, as defined by GPT-2. A
    printable Latin-1 character stands for its own byte. The characters from U+0100 on stand for the other bytes, in
    order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def train_bpe(texts: Iterator[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE with exactly `vocab_size` tokens, of which token 0 is end-of-text, and save it as `path`.

    The text is split into words by GPT-2's pattern, and no token spans two words. The same texts give the same file.
    Raises UserError if `vocab_size` is below SMALLEST_VOCABULARY, if training on the texts yields fewer tokens, or if
    the file cannot be written.
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
        raise UserError(f"the text yields only {reached} tokens, not {vocab_size}; ask for {reached} or fewer")
    try:
        path.write_text(backend.to_str(pretty=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
