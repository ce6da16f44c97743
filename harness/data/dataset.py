"""Dataset folders: their paths, meta.json and token files, and a check that a model has an embedding for every token
id."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open

from harness.common.errors import UserError
from harness.common.files import atomic_file, check_inside, check_name
from harness.common.json_files import Count, parse_config, read_json_object
from harness.common.messages import REASON_CHARACTERS, nearest, quoted

TOKEN_DTYPES = {"U16": "uint16", "U32": "uint32"}
SCAN_CHUNK_TOKENS = 2**24
FINGERPRINT_SAMPLES = 64
FINGERPRINT_SAMPLE_TOKENS = 4096

Result = TypeVar("Result", bound=BaseModel)


class SplitMeta(BaseModel):
    """Entry of one split in meta.json: counts, and the hash of the split's file."""

    model_config = ConfigDict(frozen=True, extra="allow")

    tokens: Count | None = Field(default=None, ge=0)
    bytes: Count | None = Field(default=None, ge=0)  # of UTF-8 text
    documents: Count | None = Field(default=None, ge=0)
    sha256: str | None = None


class DatasetMeta(BaseModel):
    """Contents of a dataset folder's meta.json. The published datasets of Giles Thomas's lab notebook have only the
    first three keys, and their tokens are GPT-2's."""

    model_config = ConfigDict(frozen=True, extra="allow")

    description: str = ""
    token_dtype: str | None = None
    files: dict[str, str] | list[str] = Field(default_factory=list)  # in the notebook: {"train": "train.safetensors"}
    tokenizer: str = "gpt2"
    vocab_size: Count | None = None
    eot_token: Count | None = None
    splits: dict[str, SplitMeta] = Field(default_factory=dict)


class TokenFile:
    """Safetensors file of one split: a 1-D tensor `tokens` of uint16 or uint32, memory-mapped read-only."""

    def __init__(self, path: Path) -> None:
        """Open the file and read its header. Raises UserError if it is not a readable token file."""
        self.path = path
        try:
            # The torch framework would map the file writable, and a 20 GiB dataset would count against the memory limit
            # of every rank.
            self._tokens = safe_open(path, "numpy").get_slice("tokens")
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except SafetensorError as error:
            reason = str(error)[:REASON_CHARACTERS]
            remedy = "move its folder away, and make or download the dataset again"
            raise UserError(f"{path}: not a readable token file: {reason}; {remedy}") from None
        except OSError as error:
            raise UserError(f"{path}: not a readable token file: {error}; check that you may read it") from None
        shape, dtype = self._tokens.get_shape(), self._tokens.get_dtype()
        if len(shape) != 1 or dtype not in TOKEN_DTYPES:
            found = f"`tokens` has shape {list(shape)} and dtype {dtype}"
            raise UserError(f"{path}: {found}, but must be 1-D and U16 or U32; make the dataset again")
        self.dtype = TOKEN_DTYPES[dtype]
        self._length: int = shape[0]
        self._bytes = path.stat().st_size

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the tokens from position `start` on, (count,) in the file's dtype; fewer at the end of the file."""
        end = min(start + count, len(self))  # safetensors does not clamp a slice to the length, and rejects empty ones
        return self._tokens[start:end] if start < end else np.empty(0, self.dtype)

    def read_ahead(self, starts: np.ndarray, count: int) -> None:
        """Ask the operating system to load the `count` tokens that begin at each position in `starts`, and do not
        wait."""
        size = np.dtype(self.dtype).itemsize
        offset = self._bytes - len(self) * size  # the tokens are the end of the file
        # The system loads many ranges at the same time, whereas each `read` waits for the disk. macOS has no such call,
        # and some network file systems refuse it.
        with suppress(AttributeError, OSError), self.path.open("rb", buffering=0) as file:
            for start in starts.tolist():
                os.posix_fadvise(file.fileno(), offset + start * size, count * size, os.POSIX_FADV_WILLNEED)

    def largest_token(self) -> int:
        """Return the largest token id in the file, or -1 if the file is empty. Reads the whole file."""
        return max(
            (int(self.read(at, SCAN_CHUNK_TOKENS).max()) for at in range(0, len(self), SCAN_CHUNK_TOKENS)),
            default=-1,
        )

    def fingerprint(self) -> str:
        """Return a hash of the dtype, the length and samples of the tokens: a SHA-256 in hexadecimal. The other tokens
        are not read, and do not affect the hash."""
        digest = hashlib.sha256(f"{self.dtype} {len(self)}".encode())
        for at in np.linspace(0, max(0, len(self) - FINGERPRINT_SAMPLE_TOKENS), FINGERPRINT_SAMPLES).astype(int):
            digest.update(self.read(int(at), FINGERPRINT_SAMPLE_TOKENS).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Dataset:
    """Dataset folder on this machine, with the contents of its meta.json. Without a meta.json, the tokenizer is
    GPT-2's."""

    name: str
    folder: Path
    meta: DatasetMeta

    @classmethod
    def open(cls, datasets_dir: Path, name: str) -> Dataset:
        """Open DATASETS_DIR/<name>. Raises UserError as `dataset_folder` or `at` does."""
        return cls.at(dataset_folder(datasets_dir, name), name)

    @classmethod
    def at(cls, folder: Path, name: str | None = None) -> Dataset:
        """Open the dataset in `folder`, which need not be in DATASETS_DIR. `name` defaults to the last two parts of the
        folder's resolved path. Raises UserError if the folder is missing or incomplete, or its meta.json is invalid."""
        if not folder.is_dir():
            problem = "is a file, not a folder" if folder.exists() else "no such folder"
            raise UserError(f"{folder}: {problem}; give the folder of a dataset")
        meta_path = folder / "meta.json"
        if not meta_path.exists() and (folder / "tokenizer.json").exists():  # the tokens would be taken for GPT-2's
            raise UserError(
                f"{folder}: incomplete: there is a tokenizer.json, but no meta.json; put meta.json back, or write one "
                'that contains {"tokenizer": "tokenizer.json"}'
            )
        raw = read_json_object(meta_path) if meta_path.exists() else {}
        meta = parse_config(DatasetMeta, raw, meta_path)
        # os.path.isfile is false where Path.is_file raises OSError: for a name that is too long.
        for file in meta.files.values() if isinstance(meta.files, dict) else meta.files:
            if file.endswith((".safetensors", ".json")) and not os.path.isfile(folder / file):
                raise UserError(
                    f"{folder}: incomplete: there is no {quoted(file)}, which meta.json lists; complete the folder or "
                    "move it away"
                )
        dataset = cls(name or "/".join(folder.resolve().parts[-2:]), folder, meta)
        if isinstance(dataset.tokenizer, Path) and not os.path.isfile(dataset.tokenizer):
            raise UserError(
                f'{meta_path}: key "tokenizer": there is no file {quoted(meta.tokenizer)}; put it into the folder'
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
        """Argument of `load_tokenizer` for the dataset's tokenizer: "gpt2", or the path of the tokenizer's file."""
        if self.meta.tokenizer == "gpt2":
            return "gpt2"
        return self.folder / check_name(self.meta.tokenizer, f"{self.folder}/meta.json: tokenizer")

    def bytes_per_token(self, split: str) -> float | None:
        """Return the mean number of UTF-8 bytes of text per token of the split, or None if it is unknown."""
        counts = self.meta.splits.get(split, SplitMeta())
        return counts.bytes / counts.tokens if counts.bytes and counts.tokens else None

    def fingerprint(self) -> dict[str, Any]:
        """Return {split: {"tokens": its number of tokens, "sha256": `TokenFile.fingerprint`}} for those of the train
        and validation splits that exist."""
        files = {split: self.split(split) for split in ("train", "validation") if self.has_split(split)}
        return {split: {"tokens": len(file), "sha256": file.fingerprint()} for split, file in files.items()}


def check_dataset_name(name: str, given_as: str = "dataset") -> tuple[str, str]:
    """Return the owner and the short name of a dataset. Raises UserError if `name` is not a valid owner/name.
    The message begins with `given_as` and the name."""
    parts = name.split("/")
    if len(parts) != 2:
        raise UserError(f"{given_as} {quoted(name)}: must be owner/name, as on the Hugging Face Hub")
    owner, short = (check_name(part, f"{given_as} {quoted(name)}") for part in parts)
    return owner, short


def dataset_folder(datasets_dir: Path, name: str, given_as: str = "dataset") -> Path:
    """Return the path DATASETS_DIR/owner/name, which need not exist. Raises UserError if `name` is invalid, or if the
    path cannot be a folder in DATASETS_DIR. The message about an invalid name begins with `given_as` and the name."""
    try:
        owner, short = check_dataset_name(name, given_as)
    except UserError as error:
        raise UserError(f"{error}{did_you_mean(datasets_dir, name)}") from None
    for folder in (datasets_dir, datasets_dir / owner, datasets_dir / owner / short):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: is a file, but must be a folder for datasets; move it or name another place")
    check_inside(datasets_dir / owner / short, datasets_dir, "DATASETS_DIR")
    return datasets_dir / owner / short


def did_you_mean(datasets_dir: Path, name: str) -> str:
    """Return the text `; did you mean "owner/name"?`, which completes a message about a missing or misnamed dataset, or
    "" if DATASETS_DIR has no dataset with a train split and a similar name."""
    folders = [path.parent for path in sorted(datasets_dir.glob("*/*/train.safetensors"))]
    names = [f"{path.parent.name}/{path.name}" for path in folders if not path.name.startswith(".")]
    near = nearest(name, names) or next((each for each in names if each.partition("/")[2] == name), None)
    return "" if near in (None, name) else f"; did you mean {quoted(near)}?"


def is_present(datasets_dir: Path, name: str, splits: list[str]) -> bool:
    """Return True if the dataset's folder has files, among them those of `splits`. Return False if the folder is
    missing or empty. Raises UserError as `dataset_folder` does, or if a folder that is not empty lacks one of the
    splits."""
    folder = dataset_folder(datasets_dir, name)
    if not folder.exists() or not any(folder.iterdir()):
        return False
    for split in splits:
        if not (folder / f"{split}.safetensors").is_file():
            meta = read_json_object(folder / "meta.json") if (folder / "meta.json").is_file() else {}
            if isinstance(made := meta.get("splits"), dict) and split not in made:
                remedy = "name a dataset with one, or prepare this dataset with one"
                raise UserError(f"{folder}: has no {split} split; {remedy}")
            # An error, because the dataset must not be downloaded into a folder with the user's own files.
            raise UserError(
                f"{folder}: incomplete: {split}.safetensors is missing; complete the folder or, if the dataset came "
                "from the Hub, move the folder away to have it fetched again"
            )
    return True


def check_token_ids(dataset: Dataset, split: str, vocab_size: int) -> None:
    """Raise UserError if the split cannot be read, or holds a token id for which the model has no embedding.

    May read the whole file. If DATASETS_DIR can be written, later calls for the same file are fast.
    """
    tokens = dataset.split(split)
    if vocab_size > np.iinfo(tokens.dtype).max:  # the dtype cannot hold a larger token id, so no scan is needed
        return
    largest = _remembered_largest(dataset, tokens)
    if largest < vocab_size:
        return
    needed = [dataset.meta.vocab_size or 0, (dataset.meta.eot_token or 0) + 1]
    may_be_damaged = dataset.meta.vocab_size is not None and largest >= max(needed)
    for each in filter(dataset.has_split, ("train", "validation", "test")):
        with suppress(UserError):  # an unreadable file is reported when it is used
            needed.append(_remembered_largest(dataset, dataset.split(each)) + 1)
    raise UserError(
        f"{tokens.path}: token id {largest} is beyond the model's vocabulary of {vocab_size}; "
        f'set "vocab_size" in model.json to at least {max(needed)}, or use a dataset made with the model\'s tokenizer'
        + ("; but perhaps the file is damaged: the id is also beyond meta.json's vocabulary" if may_be_damaged else "")
    )


class Scan(BaseModel):
    """Result of reading a whole token file."""

    largest_token: int = Field(strict=True, ge=-1, lt=2**32)


def _remembered_largest(dataset: Dataset, tokens: TokenFile) -> int:
    """Return the largest token id in the file, from a saved scan if the file has not changed since."""
    status = tokens.path.stat()
    version = [status.st_size, status.st_mtime_ns]
    scan = remembered(dataset, tokens.path.stem, version, Scan, lambda: Scan(largest_token=tokens.largest_token()))
    return scan.largest_token


def remembered(dataset: Dataset, name: str, files: object, kind: type[Result], scan: Callable[[], Result]) -> Result:
    """Return the last saved result if it was saved with the same `files`. If not, call `scan`, save its result and
    return it.

    - `name`: distinguishes results of the same dataset.
    - `files`: JSON value that identifies the scanned files.
    - `kind`: class of the result. Its validation must refuse a damaged saved result.

    Results are saved in DATASETS_DIR/.scans if that folder can be written.
    """
    # Not in the dataset's folder, which may be the user's own.
    memory = dataset.folder.parent.parent / ".scans" / f"{dataset.name.replace('/', '--')}--{name}.json"
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):  # no saved result, or a damaged file
        known = json.loads(memory.read_text())
        if known["file"] == files:
            return kind.model_validate(known)
    found = scan()
    with suppress(OSError):  # if DATASETS_DIR is read-only, the next run scans again
        memory.parent.mkdir(exist_ok=True)
        with atomic_file(memory) as draft:
            draft.write_text(json.dumps({"file": files, **found.model_dump()}))
    return found
