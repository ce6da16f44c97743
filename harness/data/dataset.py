"""Dataset folders as training finds them: where they are, what their meta.json says, their token files, and whether a
model has embeddings for all of their tokens. loader.py reads the files as microbatches.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open

from harness.common.errors import UserError
from harness.common.files import atomic_file, check_inside, check_name
from harness.common.json_files import Count, parse_config, read_json_object
from harness.common.messages import nearest, quoted

SPLITS = ("train", "validation", "test")
TOKEN_DTYPES = {"U16": "uint16", "U32": "uint32"}
SCAN_CHUNK_TOKENS = 2**24
LONGEST_NAME = 96  # on the Hub; a file system allows 255, a download's hidden folder has a longer one
FINGERPRINT_SAMPLES = 64
FINGERPRINT_SAMPLE_TOKENS = 4096


class SplitMeta(BaseModel):
    """A dataset's description of one split, all of it optional."""

    model_config = ConfigDict(frozen=True, extra="allow")

    tokens: Count | None = Field(default=None, ge=0)
    bytes: Count | None = Field(default=None, ge=0)
    documents: Count | None = Field(default=None, ge=0)
    sha256: str | None = None


class DatasetMeta(BaseModel):
    """A dataset folder's meta.json. Datasets of the lab notebook have the first three keys only: they are GPT-2's."""

    model_config = ConfigDict(frozen=True, extra="allow")

    description: str = ""
    token_dtype: str | None = None
    files: dict[str, str] | list[str] = Field(default_factory=list)  # the notebook's: {"train": "train.safetensors"}
    tokenizer: str = "gpt2"
    vocab_size: Count | None = None
    eot_token: Count | None = None
    splits: dict[str, SplitMeta] = Field(default_factory=dict)


class TokenFile:
    """One split on disk: a 1-D tensor `tokens`, memory-mapped read-only; reading copies just the tokens asked for.

    safetensors' numpy view is used, not its torch one: that maps the file writable, which counts a 20 GiB dataset
    against the memory limits of every rank.
    """

    def __init__(self, path: Path) -> None:
        """Raises UserError if the file is missing, damaged or holds something else."""
        self.path = path
        try:
            self._tokens = safe_open(path, "numpy").get_slice("tokens")
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a readable token file: {error}") from None
        shape, dtype = self._tokens.get_shape(), self._tokens.get_dtype()
        if len(shape) != 1 or dtype not in TOKEN_DTYPES:
            raise UserError(f"{path}: `tokens` must be 1-D and U16 or U32, not {list(shape)} and {dtype}")
        self.dtype = TOKEN_DTYPES[dtype]
        self._length: int = shape[0]

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from position `start`, in the file's own dtype; fewer at the file's end."""
        end = min(start + count, len(self))  # a safetensors slice does not clamp, and refuses to be empty
        return self._tokens[start:end] if start < end else np.empty(0, self.dtype)

    def largest_token(self) -> int:
        """The largest token id in the file (-1 if it is empty), reading all of it once."""
        return max(
            (int(self.read(at, SCAN_CHUNK_TOKENS).max()) for at in range(0, len(self), SCAN_CHUNK_TOKENS)),
            default=-1,
        )

    def fingerprint(self) -> str:
        """SHA-256 of the length and of samples spread over the whole file: another tokenisation, order or selection of
        documents shows in it, and 20 GiB take milliseconds."""
        digest = hashlib.sha256(f"{self.dtype} {len(self)}".encode())
        for at in np.linspace(0, max(0, len(self) - FINGERPRINT_SAMPLE_TOKENS), FINGERPRINT_SAMPLES).astype(int):
            digest.update(self.read(int(at), FINGERPRINT_SAMPLE_TOKENS).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Dataset:
    """A dataset folder that is on this machine."""

    name: str
    folder: Path
    meta: DatasetMeta

    @classmethod
    def open(cls, datasets_dir: Path, name: str) -> Dataset:
        """Raises UserError if the folder or its meta.json is not what DATASETS_DIR/<name> must be."""
        return cls.at(dataset_folder(datasets_dir, name), name)

    @classmethod
    def at(cls, folder: Path, name: str | None = None) -> Dataset:
        """The dataset in a folder, wherever that is. Raises UserError if it is none."""
        if not folder.is_dir():
            raise UserError(f"{folder}: {'is a file, not a folder' if folder.exists() else 'no such folder'}")
        meta_path = folder / "meta.json"
        present = meta_path.exists()
        meta = parse_config(DatasetMeta, read_json_object(meta_path), meta_path) if present else DatasetMeta()
        for file in meta.files.values() if isinstance(meta.files, dict) else meta.files:
            if file.endswith((".safetensors", ".json")) and not _is_file(folder, file):
                raise UserError(
                    f"{folder}: incomplete: meta.json lists {quoted(file)}; complete the folder or move it away"
                )
        dataset = cls(name or "/".join(folder.resolve().parts[-2:]), folder, meta)
        if isinstance(dataset.tokenizer, Path) and not _is_file(folder, dataset.tokenizer.name):
            raise UserError(
                f'{meta_path}: key "tokenizer": {quoted(meta.tokenizer)} is missing; put it into the folder'
            )
        return dataset

    def has_split(self, split: str) -> bool:
        return self.split_path(split).exists()

    def split_path(self, split: str) -> Path:
        return self.folder / f"{split}.safetensors"

    def split(self, split: str) -> TokenFile:
        return TokenFile(self.split_path(split))

    @property
    def tokenizer(self) -> str | Path:
        """ "gpt2", or the path of the tokenizer file."""
        if self.meta.tokenizer == "gpt2":
            return "gpt2"
        return self.folder / check_name(self.meta.tokenizer, f"{self.folder}/meta.json: tokenizer")

    def bytes_per_token(self, split: str) -> float | None:
        """Mean UTF-8 bytes of text that a token of the split stands for, where meta.json knows."""
        counts = self.meta.splits.get(split, SplitMeta())
        return counts.bytes / counts.tokens if counts.bytes and counts.tokens else None

    def fingerprint(self) -> dict[str, Any]:
        """Identity among datasets of the same name: tokens and a sampled hash of train and of validation."""
        files = {split: self.split(split) for split in ("train", "validation") if self.has_split(split)}
        return {split: {"tokens": len(file), "sha256": file.fingerprint()} for split, file in files.items()}


def _is_file(folder: Path, name: str) -> bool:
    """True if there is a file of that name in the folder or below it."""
    try:
        return ".." not in Path(name).parts and not Path(name).is_absolute() and (folder / name).is_file()
    except OSError:  # a name too long for the file system
        return False


def check_dataset_name(name: str) -> tuple[str, str]:
    """The owner and the short name in `name`. Raises UserError for a name of another form."""
    parts = name.split("/")
    if len(parts) != 2:
        raise UserError(f"dataset {quoted(name)}: must be owner/name, as on the Hugging Face Hub")
    if max(map(len, parts)) > LONGEST_NAME:
        raise UserError(f"dataset {quoted(name)}: longer than {LONGEST_NAME} characters")
    owner, short = (check_name(part, f"dataset {quoted(name)}") for part in parts)
    return owner, short


def dataset_folder(datasets_dir: Path, name: str) -> Path:
    """DATASETS_DIR/owner/name. Raises UserError for a name of another form, or for a file in the folder's place."""
    try:
        owner, short = check_dataset_name(name)
    except UserError as error:
        near = neighbour(datasets_dir, name)
        raise UserError(f"{error}" + (f"; did you mean {quoted(near)}?" if near else "")) from None
    for folder in (datasets_dir, datasets_dir / owner, datasets_dir / owner / short):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: is a file, but must be a folder for datasets; move it or name another place")
    check_inside(datasets_dir / owner / short, datasets_dir, "DATASETS_DIR")
    return datasets_dir / owner / short


def neighbour(datasets_dir: Path, name: str) -> str | None:
    """The data set on this machine that a name which is none of theirs was probably meant for: one of a similar name,
    or of the same without its owner."""
    folders = [path.parent for path in sorted(datasets_dir.glob("*/*/train.safetensors"))]
    names = [f"{path.parent.name}/{path.name}" for path in folders if not path.name.startswith(".")]
    return nearest(name, names) or next((each for each in names if each.partition("/")[2] == name), None)


def neighbour_remark(datasets_dir: Path, name: str) -> str | None:
    """A remark on a data set that is not on this machine, where one of a similar name is."""
    near = neighbour(datasets_dir, name)
    return None if near in (None, name) else f'"{name}" is not in {datasets_dir}; did you mean "{near}"?'


def is_present(datasets_dir: Path, name: str, splits: list[str]) -> bool:
    """True if the folder holds the wanted splits, so that nothing needs to be fetched.

    Raises UserError if it holds something, but not those: a user's own files are not touched.
    """
    folder = dataset_folder(datasets_dir, name)
    if not folder.exists() or not any(folder.iterdir()):
        return False
    for split in splits:
        if not (folder / f"{split}.safetensors").is_file():
            raise UserError(
                f"{folder}: incomplete: {split}.safetensors is missing; complete the folder, or move it away to have "
                "the dataset fetched again"
            )
    return True


def check_token_ids(dataset: Dataset, split: str, vocab_size: int) -> None:
    """Find a token id the model has no embedding for, before training does.

    The scan's result is remembered beside the dataset folders (never inside a user's own). Raises UserError naming the
    file, the id, and the vocabulary that the whole dataset needs.
    """
    tokens = dataset.split(split)
    if vocab_size > np.iinfo(tokens.dtype).max:
        return
    largest = _remembered_largest(dataset, tokens)
    if largest >= vocab_size:
        raise UserError(
            f"{tokens.path}: token id {largest} is beyond the model's vocabulary of {vocab_size}; "
            f'set "vocab_size" in model.json to at least {needed_vocabulary(dataset)}, or use the matching dataset'
        )


def needed_vocabulary(dataset: Dataset) -> int:
    """The smallest vocab_size for every token of the dataset: what meta.json says, and what the splits hold."""
    found = [dataset.meta.vocab_size or 0, (dataset.meta.eot_token or 0) + 1]
    for split in SPLITS:
        if dataset.has_split(split):
            with suppress(UserError):  # a file that cannot be read is reported where it is used
                found.append(_remembered_largest(dataset, dataset.split(split)) + 1)
    return max(found)


def _remembered_largest(dataset: Dataset, tokens: TokenFile) -> int:
    """The largest token id in the file: from an earlier run's scan if the file is unchanged, else from a scan now."""
    memory = dataset.folder.parent.parent / ".scans" / f"{dataset.name.replace('/', '--')}--{tokens.path.stem}.json"
    status = tokens.path.stat()
    key = [status.st_size, status.st_mtime_ns]
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):  # not scanned yet, or not written by us
        known = json.loads(memory.read_text())
        largest = known["largest_token"]
        if known["file"] == key and isinstance(largest, int) and -1 <= largest <= np.iinfo(tokens.dtype).max:
            return largest
    largest = tokens.largest_token()
    with suppress(OSError):  # a read-only datasets folder: scan again next time
        memory.parent.mkdir(exist_ok=True)
        with atomic_file(memory) as draft:
            draft.write_text(json.dumps({"file": key, "largest_token": largest}))
    return largest
