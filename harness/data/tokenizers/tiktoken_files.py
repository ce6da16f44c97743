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


def load_encoding(name_or_file: str | Path) -> Tokenizer:
    """Return the tokenizer of a tiktoken encoding. A str is the encoding's name; a Path is a file with the text that
    `encoding_file` returns. Raises UserError if the encoding cannot be read, or has no end-of-text token."""
    encoding = read_encoding(name_or_file)
    special = encoding._special_tokens
    if END_OF_TEXT not in special:
        raise UserError(f"{name_or_file}: has no {END_OF_TEXT} token, which separates documents")
    token_bytes = [b""] * encoding.n_vocab  # stays empty for the unused ids of some encodings
    for token, rank in encoding._mergeable_ranks.items():
        token_bytes[rank] = token
    for text, rank in special.items():
        token_bytes[rank] = text.encode()

    def encode(text: str) -> np.ndarray:
        return encoding.encode_to_numpy(text, disallowed_special=())

    return Tokenizer(token_bytes, special[END_OF_TEXT], set(special.values()), encode, name_or_file)


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
    """Return the contents of a file that describes the tiktoken encoding `name`. Such a file is stored with a dataset
    whose tokens were made with the encoding.

    The contents are JSON with the keys name, pattern (the regular expression that splits text into words),
    special_tokens, and ranks (tokens in base64 with their ids). Raises UserError if the encoding's vocabulary is not on
    this machine and cannot be downloaded.
    """
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
    returns. Raises UserError if the vocabulary of a named encoding is not on this machine and cannot be downloaded, or
    if the file is missing or damaged."""
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
            damage = f"not a tiktoken encoding in the format of this tool: {str(error)[:100]}"
            raise UserError(f"{name_or_file}: {reason or damage}") from None
        folder = os.environ.get("TIKTOKEN_CACHE_DIR")
        where = f"in TIKTOKEN_CACHE_DIR={folder}" if folder else "on this machine (TIKTOKEN_CACHE_DIR is not set)"
        what = "GPT-2's vocabulary" if name_or_file == "gpt2" else f"the vocabulary of {name_or_file}"
        raise UserError(
            f"{what} is not {where} and cannot be downloaded ({reason or type(error).__name__}); connect to the "
            "network once, or set TIKTOKEN_CACHE_DIR to a folder filled by tiktoken on another machine"
        ) from None
