"""What a dataset says of itself: the meta.json that is written when its files are whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.encode import token_dtype
from harness.files import replace_text, sha256
from harness.splits import Split
from harness.tokenizer import Tokenizer


def write_dataset_meta(
    folder: Path, splits: Sequence[Split], tokenizer: Tokenizer, tokenizer_name: str, about: dict[str, Any]
) -> None:
    """Describe the splits in `folder`. `about` holds what only the maker knows: "description" and "source".

    Nothing in it depends on when or where it was made: the same text gives the same bytes.
    """
    files = [f"{split.name}.safetensors" for split in splits]
    meta = {
        "description": about["description"],
        "token_dtype": token_dtype(tokenizer.vocab_size).name,
        "files": files if tokenizer_name == "gpt2" else [*files, tokenizer_name],
        "tokenizer": tokenizer_name,
        "vocab_size": tokenizer.vocab_size,
        "eot_token": tokenizer.eot_token,
        **({} if tokenizer_name == "gpt2" else {"tokenizer_sha256": sha256(folder / tokenizer_name)}),
        "splits": {split.name: _count(folder, split) for split in splits},
        "source": about["source"],
    }
    replace_text(folder / "meta.json", json.dumps(meta, indent=2, ensure_ascii=False) + "\n")


def _count(folder: Path, split: Split) -> dict[str, int | str]:
    digest = sha256(folder / f"{split.name}.safetensors")
    return {"documents": split.documents, "tokens": split.tokens, "bytes": split.bytes, "sha256": digest}
