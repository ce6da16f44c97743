"""Load the tokenizer that a dataset or a checkpoint names."""

from __future__ import annotations

from pathlib import Path

from harness.common.errors import UserError
from harness.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer

# Text that a lossy tokenizer would change: white space, combining marks and ligatures (normalization), characters of
# other scripts, and the name of the special token.
ROUND_TRIP_PROBE = f"x  a  b\r\n\tE\u0301 \ufb01 日本 \U0001f40d\x00 {END_OF_TEXT} "


def load_tokenizer(name_or_file: str | Path) -> Tokenizer:
    """Return GPT-2's tokenizer for "gpt2", otherwise the tokenizer in a file: a byte-level BPE's tokenizer.json, or an
    encoding of tiktoken as `tiktoken_files.encoding_file` writes it.

    Raises UserError if GPT-2's vocabulary can be neither found nor downloaded, if the file is missing or damaged, or
    if text changes when the tokenizer encodes and decodes it.
    """
    from harness.data.tokenizers import bpe, tiktoken_files

    if name_or_file == "gpt2":
        return tiktoken_files.load_encoding("gpt2")
    path = Path(name_or_file)
    tokenizer = tiktoken_files.load_encoding(path) if path.name.endswith(tiktoken_files.SUFFIX) else bpe.load_file(path)
    if tokenizer.decode(tokenizer.encode(ROUND_TRIP_PROBE)) != ROUND_TRIP_PROBE:
        raise UserError(
            f"{path}: decoding does not give back the encoded text; use a byte-level BPE that has neither a "
            "normalizer nor a prefix space"
        )
    return tokenizer
