"""Datasets made on this machine: no network, no account.

`builtin/python-stdlib` is the text of the running Python's own standard library.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from harness.common.errors import UserError
from harness.common.files import atomic_folder
from harness.common.libraries import usable_cores
from harness.data.preparation.encode import batches, encode_batches, encode_texts, token_dtype
from harness.data.preparation.splits import SPLITS, by_documents, write_dataset_meta, write_splits
from harness.data.preparation.stream import StreamSize, TokenStream
from harness.data.preparation.text_input import Piece
from harness.data.tokenizers.bpe import train_bpe
from harness.data.tokenizers.load import load_tokenizer

# A model with 4 layers of width 256, two CPU cores, a minute: 2.74 validation bits per byte with 2048 tokens, 2.53 with
# 4096. 8192 gave 2.39, but by then two fifths of the parameters are embeddings.
DEFAULT_VOCAB_SIZE = 4096
# Installed packages and tests are not the library; the tables of encodings and the help texts of pydoc_data are
# generated, over a fifth of all tokens, and nothing a sample should look like.
SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "__pycache__"),
    *("encodings", "pydoc_data"),
}
HELD_OUT_SHARES = {"test": 0.05, "validation": 0.05}


def build_python_stdlib(folder: Path, vocab_size: int = DEFAULT_VOCAB_SIZE) -> None:
    """Write the dataset into `folder`, which appears whole or not at all. A folder that is whole already stays.

    The same Python gives byte-identical files. Raises UserError if there is no space, or no source text.
    """
    if _is_whole(folder):
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder}: incomplete; move it away, and it is built again")
    splits = split_documents(read_documents())
    try:
        with atomic_folder(folder) as draft:
            _write_dataset(draft, splits, vocab_size)
    except OSError as error:
        if not _is_whole(folder):  # another process may have built the same in the meantime: its files are as good
            raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from None


BUILTIN_DATASETS: dict[str, Callable[[Path], None]] = {"builtin/python-stdlib": build_python_stdlib}


def read_documents() -> dict[str, str]:
    """Relative path → text of each source file of the standard library, sorted by path, each text once.

    Raises UserError if this Python keeps no readable sources.
    """
    library = Path(sysconfig.get_path("stdlib"))
    path_of_text: dict[str, str] = {}
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).as_posix()):
        relative = path.relative_to(library)
        # Python's own list of its modules leaves out what distributions and builds put into the folder.
        is_module = relative.parts[0].removesuffix(".py") in sys.stdlib_module_names
        if is_module and not SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            with suppress(OSError, UnicodeDecodeError):  # some cannot be read as UTF-8
                path_of_text.setdefault(path.read_bytes().decode("utf-8"), relative.as_posix())
    path_of_text.pop("", None)
    if not path_of_text:
        raise UserError(
            f"{library}: this Python keeps no readable source files of its standard library; "
            "use one that does (uv python install), or another dataset"
        )
    return {path: text for text, path in path_of_text.items()}


def split_documents(documents: dict[str, str]) -> dict[str, list[str]]:
    """Share documents out among the splits, about 90/5/5 by bytes; every document is in one split.

    The order within a split is that of the paths' hashes, so that any slice of it is a sample of the whole library.
    """
    sizes = {path: len(text.encode()) for path, text in documents.items()}
    room = {split: share * sum(sizes.values()) for split, share in HELD_OUT_SHARES.items()}
    splits: dict[str, list[str]] = {split: [] for split in SPLITS}
    for path in sorted(documents, key=lambda path: hashlib.sha256(path.encode()).digest()):
        split = next((split for split in room if sizes[path] <= room[split]), "train")
        splits[split].append(documents[path])
        if split in room:
            room[split] -= sizes[path]
    return splits


def _write_dataset(folder: Path, splits: dict[str, list[str]], vocab_size: int) -> None:
    tokenizer_path = folder / "tokenizer.json"
    train_bpe(iter(splits["train"]), vocab_size, tokenizer_path)
    tokenizer = load_tokenizer(tokenizer_path)
    stream = TokenStream(folder / "text.tokens", token_dtype(tokenizer.vocab_size))
    stream.open_at(StreamSize())
    pieces = (Piece(text, True, 0, 0) for split in SPLITS for text in splits[split])
    with ThreadPoolExecutor(usable_cores()) as threads:
        encoded = encode_batches(
            batches(pieces), lambda texts: threads.submit(encode_texts, tokenizer, texts), usable_cores()
        )
        for batch in encoded:
            stream.append(batch)
    stream.close()
    parts = by_documents(stream, {split: len(splits[split]) for split in SPLITS})
    write_splits(stream, parts, folder)
    stream.index_path.unlink()
    version = f"{platform.python_implementation()} {platform.python_version()}"
    description = (
        f"The standard library of {version}, one document a file, each followed by end-of-text; byte-level BPE trained "
        "on the train split."
    )
    source = {"python": platform.python_version(), "implementation": platform.python_implementation()}
    write_dataset_meta(folder, parts, tokenizer, tokenizer_path.name, description=description, source=source)


def _is_whole(folder: Path) -> bool:
    """meta.json is part of a folder that appeared by one rename; the files could have been removed since."""
    names = ("meta.json", "tokenizer.json", *(f"{split}.safetensors" for split in SPLITS))
    return all((folder / name).is_file() for name in names)
