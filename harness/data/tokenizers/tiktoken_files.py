"""Encodings of tiktoken: GPT-2's is loaded by name, others from a file in the dataset's folder.

tiktoken is imported where it is used, because a command's --help does not need it.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from harness.common.errors import UserError
from harness.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer

SUFFIX = ".tiktoken.json"


def known_encodings() -> list[str]:
    """Return the names of tiktoken's encodings."""
    import tiktoken

    return sorted(tiktoken.list_encoding_names())


def load_encoding(name: str) -> Tokenizer:
    """Return the tokenizer of a tiktoken encoding. Raises UserError if its vocabulary is not on this machine and cannot
    be downloaded."""
    return _tokenizer(_get(name), name)


def load_encoding_offline(name: str) -> Tokenizer | None:
    """Return the tokenizer of a tiktoken encoding, or None if its vocabulary is not on this machine. Downloads
    nothing."""
    import tiktoken.load

    def refuse(blobpath: str) -> bytes:
        raise ConnectionError(blobpath)

    download = tiktoken.load.read_file
    tiktoken.load.read_file = refuse
    try:
        return load_encoding(name)
    except UserError:
        return None
    finally:
        tiktoken.load.read_file = download


def encoding_file(name: str) -> str:
    """Return the text of a file that describes an encoding. The file is kept with the dataset that was made with it.

    The text is JSON with the keys name, pattern (the regular expression that splits text into words), special_tokens,
    and ranks (tokens in base64 with their ids). Raises UserError like `load_encoding`.
    """
    encoding = _get(name)
    _tokenizer(encoding, name)  # raises UserError if the encoding has no end-of-text token
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    content = {
        "name": name,
        "pattern": encoding._pat_str,
        "special_tokens": encoding._special_tokens,
        "ranks": {base64.b64encode(token).decode(): rank for token, rank in ranks},
    }
    return json.dumps(content, indent=0) + "\n"


def load_file(path: Path) -> Tokenizer:
    """Return the tokenizer of an encoding file. Raises UserError if the file is missing or damaged."""
    try:
        return _tokenizer(read_encoding(path), str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not an encoding of tiktoken as this tool writes it: {str(error)[:100]}") from None


def read_encoding(name_or_file: str | Path) -> Any:
    """Return the tiktoken.Encoding with a name (str), or from a file that `load_file` accepts (Path). Raises UserError
    like `load_encoding` for a name; errors of reading a file are not converted."""
    import tiktoken

    if isinstance(name_or_file, str):
        return _get(name_or_file)
    content = json.loads(name_or_file.read_text(encoding="utf-8"))
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in content["ranks"].items()}
    special = {str(token): int(rank) for token, rank in content["special_tokens"].items()}
    return tiktoken.Encoding(
        str(content["name"]), pat_str=str(content["pattern"]), mergeable_ranks=ranks, special_tokens=special
    )


def _get(name: str) -> Any:
    import tiktoken

    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong checksum is a ValueError
        folder = os.environ.get("TIKTOKEN_CACHE_DIR")
        where = f"in TIKTOKEN_CACHE_DIR={folder}" if folder else "on this machine (TIKTOKEN_CACHE_DIR is not set)"
        reason = getattr(error, "strerror", None) or type(error).__name__  # requests' messages are very long
        what = "GPT-2's vocabulary" if name == "gpt2" else f"the vocabulary of {name}"
        raise UserError(
            f"{what} is not {where} and cannot be downloaded ({reason}); connect to the network once, or set "
            "TIKTOKEN_CACHE_DIR to a folder filled by tiktoken on another machine"
        ) from None


def _tokenizer(encoding: Any, where: str) -> Tokenizer:
    special = encoding._special_tokens
    if END_OF_TEXT not in special:
        raise UserError(f"{where}: has no {END_OF_TEXT} token, which separates documents")
    token_bytes = [b""] * encoding.n_vocab  # some encodings have unused ids, which stay empty
    for token, rank in encoding._mergeable_ranks.items():
        token_bytes[rank] = token
    for text, rank in special.items():
        token_bytes[rank] = text.encode()

    def encode(text: str) -> np.ndarray:
        return encoding.encode_to_numpy(text, disallowed_special=())

    return Tokenizer(token_bytes, special[END_OF_TEXT], set(special.values()), encode)
