"""The dataset `builtin/python-stdlib`, which is built on this machine, without network or account: the text of the
running Python's own standard library."""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from harness.common.errors import UserError
from harness.common.files import atomic_folder
from harness.common.libraries import usable_cores
from harness.data.preparation.encode import encode_texts
from harness.data.preparation.splits import SPLITS, Split, write_dataset_meta
from harness.data.preparation.stream import token_file
from harness.data.tokenizers import load_tokenizer, train_bpe

# Chosen by training a model of 4 layers of width 256 for a minute on two CPU cores: it reached 2.74 validation bits per
# byte with a vocabulary of 2048 tokens, and 2.53 with 4096. It reached 2.39 with 8192, but two fifths of its parameters
# were then embeddings.
DEFAULT_VOCAB_SIZE = 4096
# Installed packages are not part of the library. Tests, and the programs IDLE and turtledemo, are not meant to be
# imported. The tables in encodings and the help texts in pydoc_data are generated. These two would be over a fifth of
# all tokens, and a model should not learn to write them.
SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "__pycache__"),
    *("encodings", "pydoc_data"),
}
HELD_OUT_SHARES = {"test": 0.05, "validation": 0.05}


def build_python_stdlib(folder: Path, vocab_size: int = DEFAULT_VOCAB_SIZE) -> None:
    """Build the dataset in `folder`, which never holds an incomplete dataset. The same Python gives byte-identical
    files. Raises UserError if the folder cannot be written, or if this Python has too little readable source text."""
    splits = split_documents(standard_library())
    try:
        with atomic_folder(folder) as draft:
            _write_dataset(draft, splits, vocab_size)
    except OSError as error:
        if not (folder / "meta.json").is_file():  # otherwise, another process has built the dataset in the meantime
            raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from None


def standard_library() -> dict[str, str]:
    """Return {relative path: text} of the standard library's readable source files, sorted by path, each text once.
    Files in SKIPPED_FOLDERS are left out. Raises UserError if there are no such files."""
    library = Path(sysconfig.get_path("stdlib"))
    path_of_text: dict[str, str] = {}
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).as_posix()):
        relative = path.relative_to(library)
        # Linux distributions and builds of Python add other modules to this folder, which are not in
        # sys.stdlib_module_names.
        is_module = relative.parts[0].removesuffix(".py") in sys.stdlib_module_names
        if is_module and not SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            with suppress(OSError, UnicodeDecodeError):  # a few files are unreadable or not UTF-8
                path_of_text.setdefault(path.read_bytes().decode("utf-8"), relative.as_posix())
    path_of_text.pop("", None)
    if not path_of_text:
        raise UserError(
            f"{library}: this Python has no readable source files of its standard library; "
            "use a Python that has them (uv python install), or another dataset"
        )
    return {path: text for text, path in path_of_text.items()}


def split_documents(documents: dict[str, str]) -> dict[str, list[str]]:
    """Divide `documents` (path -> text) among the splits, and return the texts of each split. HELD_OUT_SHARES gives the
    approximate shares of the held-out splits, in bytes."""
    sizes = {path: len(text.encode()) for path, text in documents.items()}
    room = {split: share * sum(sizes.values()) for split, share in HELD_OUT_SHARES.items()}
    splits: dict[str, list[str]] = {split: [] for split in SPLITS}
    # Sorted by hash, so that any slice of a split is a sample of the whole library.
    for path in sorted(documents, key=lambda path: hashlib.sha256(path.encode()).digest()):
        split = next((split for split in room if sizes[path] <= room[split]), "train")
        splits[split].append(documents[path])
        if split in room:
            room[split] -= sizes[path]
    return splits


def _write_dataset(folder: Path, documents: dict[str, list[str]], vocab_size: int) -> None:
    """Write all files of the dataset to `folder`. `documents` has the texts of each split."""
    train_bpe(iter(documents["train"]), vocab_size, folder / "tokenizer.json")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    splits = []
    with ThreadPoolExecutor(usable_cores()) as threads:
        for name, texts in documents.items():
            counts = np.zeros(2, np.int64)  # tokens and bytes
            with token_file(folder / f"{name}.safetensors", tokenizer.dtype) as file:
                for tokens, sizes in threads.map(lambda text: encode_texts(tokenizer, [(text, True)]), texts):
                    file.write(tokens.data)
                    counts += sizes[0]
            splits.append(Split(name, 0, int(counts[0]), len(texts), int(counts[1])))
    version = f"{platform.python_implementation()} {platform.python_version()}"
    description = (
        f"The standard library of {version}, one document per file, each followed by end-of-text; byte-level BPE "
        "trained on the train split."
    )
    source = {"python": platform.python_version(), "implementation": platform.python_implementation()}
    write_dataset_meta(folder, splits, tokenizer, description, source)
