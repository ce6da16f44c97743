"""The splits of a dataset: which documents are for training, for testing and for validation, their files, and the
meta.json that tells of them.

Documents are held out by a number that is drawn for each, until the splits have their shares of the text's bytes: the
tokenizer, which may be trained on the rest, changes nothing about that. Tens of millions of documents are not sorted:
the few that may be held out go into a stream of their own while the text is read, the pool, and those of them that are
not held out are appended to the training stream in the end, in the order of their numbers. That stream then becomes a
file without being copied. Of a small text all documents are in the pool, and so in this order.

In the order that is given, splits are ranges of one stream: its ends are copied, and what remains is for training.
token_input.py, whose input comes split, uses the meta.json alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from harness.common.errors import UserError
from harness.common.files import replace_text, sha256, sync
from harness.data.preparation.encode import token_dtype
from harness.data.preparation.stream import (
    DOCUMENTS_PER_READ,
    HEADER_BYTES,
    TokenStream,
    copy,
    copy_documents,
    token_file,
    write_header,
)
from harness.data.tokenizers.tokenizer import Tokenizer

SPLITS = ("train", "test", "validation")  # in the order of a text's documents
LINE_END_SEARCH = 4096  # tokens
COUNTED_AT_ONCE = 2**22  # tokens
DRAWING_KEY = 0
POOL_DOCUMENTS = 2**14  # all of no more than these are in the pool, so that a small text's shares are met, too
POOL_SHARE = 4  # of what is to be held out: a few very long documents may make up most of a text


@dataclass(frozen=True)
class SplitSizes:
    """Shares of the text; the rest is for training."""

    validation: float = 0.01
    test: float = 0.0
    order: Literal["seeded", "given"] = "seeded"  # held out: documents that are drawn, or the last ones

    def held_out(self) -> dict[str, float]:
        """The parts by name, in the order of the text's documents, without empty ones."""
        return {name: share for name, share in (("test", self.test), ("validation", self.validation)) if share}

    def in_pool(self, first: int, count: int) -> np.ndarray:
        """(count,) bool: true for those of the documents from number `first` on that may be held out."""
        share = self.validation + self.test
        limit = np.maximum(POOL_SHARE * share, POOL_DOCUMENTS / np.arange(first + 1, first + 1 + count))
        return (draws(first, count) < limit) & (self.order == "seeded")

    def choose(self, draws: np.ndarray, lengths: np.ndarray, total: int) -> dict[str, np.ndarray]:
        """The documents to hold out, by split, of those with these draws and lengths, in a text of length `total`.

        In the order of their draws, each goes into a split that comes nearer to its share by it; hence no document more
        than twice as long as a split is held out. Validation comes first, so that a test split hardly changes it.
        """
        wanted = {name: share * total for name, share in reversed(self.held_out().items())}
        chosen: dict[str, list[int]] = {name: [] for name in wanted}
        order = np.argsort(draws, kind="stable")
        for place, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
            name = next((name for name, room in wanted.items() if length <= 2 * room), None)
            if name is not None:
                chosen[name].append(place)
                wanted[name] -= length
        return {name: np.array(places, np.int64) for name, places in chosen.items()}


def draws(first: int, count: int) -> np.ndarray:
    """(count,) float64, uniform in [0, 1): the draws of the documents from number `first` on, those without text not
    counted. Their numbers alone decide them, and the raw numbers are the same in every version of numpy."""
    words = 4  # that Philox makes of each count
    raw = np.random.Philox(key=DRAWING_KEY, counter=first // words).random_raw(first % words + count)
    return (raw[first % words :] >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class Split:
    """A range of a stream, and what is in it. `bytes` is UTF-8 text without separators."""

    name: str
    start: int
    tokens: int
    documents: int
    bytes: int
    longest_document: int = 0  # in tokens; 0 where that is not known


def hold_out(pool: TokenStream, stream: TokenStream, sizes: SplitSizes, folder: Path) -> list[Split]:
    """Write the held-out splits' files of documents in the pool, and append its other documents to the stream: the
    splits, the stream being the first; an empty list, and the stream has all of them, if a split would get no document.
    """
    documents = np.concatenate([np.zeros((0, 2), np.int64), *pool.documents()])
    length = int(sum(block[:, 1].sum() for block in (documents, *stream.documents())))
    total = (pool.size + stream.size).documents
    parts = [(at, min(DOCUMENTS_PER_READ, total - at)) for at in range(0, total, DOCUMENTS_PER_READ)]
    drawn = np.concatenate([draws(*part)[sizes.in_pool(*part)] for part in parts])
    chosen = sizes.choose(drawn, documents[:, 1], length)
    order = np.argsort(drawn, kind="stable")
    left = order[~np.isin(order, np.concatenate([np.zeros(0, np.int64), *chosen.values()]))]
    is_possible = all(map(len, chosen.values())) and stream.size.documents + len(left) > 0
    splits = [_write_split(pool, documents, name, chosen[name], folder) for name in sizes.held_out() if is_possible]
    longest = max(int(block[:, 0].max(initial=0)) for block in (documents[left], *stream.documents()))
    stream.append_documents(pool, documents, left if is_possible else np.arange(len(documents)))
    length -= sum(split.bytes for split in splits)
    train = Split("train", 0, stream.size.tokens, stream.size.documents, length, longest)
    return [train, *splits] if is_possible else []


def _write_split(pool: TokenStream, documents: np.ndarray, name: str, places: np.ndarray, folder: Path) -> Split:
    """Write a split's file of the documents at `places`, in the order of their draws, so that any part of the split is
    a sample of the whole text."""
    tokens, length = documents[places].sum(axis=0).tolist()
    with token_file(folder / f"{name}.safetensors", pool.dtype, tokens) as file:
        copy_documents(pool.path, documents[:, 0] * pool.dtype.itemsize, places, file, HEADER_BYTES)
    return Split(name, 0, tokens, len(places), length)


def assign_splits(stream: TokenStream, sizes: SplitSizes, tokenizer: Tokenizer) -> list[Split]:
    """Train, test and validation, in this order: the last documents are for validation, those before them for testing.

    Where there are too few documents for that (one book), the last tokens are, from the beginning of a line on.
    Raises UserError if a split would have no text at all.
    """
    counts = {name: round(share * stream.size.documents) for name, share in sizes.held_out().items()}
    counts = {"train": stream.size.documents - sum(counts.values()), **counts}
    splits = by_documents(stream, counts) if all(count > 0 for count in counts.values()) else None
    splits = splits or _by_tokens(stream, sizes, tokenizer)
    for split in splits:
        if not split.bytes:
            raise UserError(
                f"{split.name} would be empty: there are {stream.size.documents:,} documents with "
                f"{stream.size.tokens:,} tokens; give more text, or a larger --{split.name}-fraction"
            )
    return splits


def by_documents(stream: TokenStream, counts: dict[str, int]) -> list[Split]:
    """The stream's documents in order, so many for each split."""
    ends = np.cumsum(list(counts.values()))
    totals = np.zeros((len(counts), 2), np.int64)
    first = 0
    for sizes in stream.documents():
        owner = np.searchsorted(ends, np.arange(first, first + len(sizes)), side="right")
        np.add.at(totals, owner, sizes)
        first += len(sizes)
    starts = np.cumsum(totals[:, 0]) - totals[:, 0]
    return [
        Split(name, int(start), int(tokens), count, int(length))
        for (name, count), start, (tokens, length) in zip(counts.items(), starts, totals, strict=True)
    ]


def _by_tokens(stream: TokenStream, sizes: SplitSizes, tokenizer: Tokenizer) -> list[Split]:
    wanted = sizes.held_out()
    total = stream.size.tokens
    bounds = [0]
    for at in range(len(wanted)):
        share = sum(list(wanted.values())[at:])
        bounds.append(_next_line(stream, total - round(share * total), tokenizer))
    bounds.append(total)
    names = ["train", *wanted]
    return [_counted(stream, name, bounds[at], bounds[at + 1], tokenizer) for at, name in enumerate(names)]


def _next_line(stream: TokenStream, start: int, tokenizer: Tokenizer) -> int:
    """The first position from `start` on that follows the end of a line or of a document, if there is one near."""
    for at, token in enumerate(_tokens_at(stream, start, LINE_END_SEARCH).tolist(), start + 1):
        if at < stream.size.tokens and (token == tokenizer.eot_token or tokenizer.decode([token]).endswith("\n")):
            return at
    return start


def _counted(stream: TokenStream, name: str, start: int, end: int, tokenizer: Tokenizer) -> Split:
    """The range as a split, its documents and bytes counted."""
    lengths = tokenizer.token_byte_lengths()
    documents = length = 0
    for at in range(start, end, COUNTED_AT_ONCE):
        tokens = _tokens_at(stream, at, min(COUNTED_AT_ONCE, end - at))
        documents += int((tokens == tokenizer.eot_token).sum())
        length += int(lengths[tokens].sum())
    return Split(name, start, max(0, end - start), documents, length)


def _tokens_at(stream: TokenStream, start: int, count: int) -> np.ndarray:
    """`count` tokens of the stream from `start` on; fewer at its end."""
    count = max(0, min(count, stream.size.tokens - start))
    return np.fromfile(stream.path, stream.dtype, count, offset=HEADER_BYTES + start * stream.dtype.itemsize)


def write_splits(stream: TokenStream, splits: list[Split], folder: Path) -> None:
    """Write each split of the stream to a file in `folder`. Existing files are kept, so that it can be called again."""
    train, *others = splits
    width = stream.dtype.itemsize
    for split in others:
        path = folder / f"{split.name}.safetensors"
        if not path.exists():
            with token_file(path, stream.dtype, split.tokens) as file, stream.path.open("rb") as source:
                source.seek(HEADER_BYTES + split.start * width)
                copy(source, file, split.tokens * width)
    sync(folder)
    path = folder / "train.safetensors"
    if not path.exists():  # only now: it cuts off what the others were copied from
        write_header(stream.path, stream.dtype, train.tokens)
        stream.path.rename(path)
        sync(folder)


def write_dataset_meta(
    folder: Path,
    splits: Sequence[Split],
    tokenizer: Tokenizer,
    tokenizer_name: str,
    *,
    description: str,
    source: Mapping[str, object],
) -> None:
    """Describe the splits in `folder`, in its meta.json; `source` is where the text came from.

    Nothing in it depends on when or where it was made: the same text gives the same bytes.
    """
    files = [f"{split.name}.safetensors" for split in splits]
    meta = {
        "description": description,
        "token_dtype": token_dtype(tokenizer.vocab_size).name,
        "files": files if tokenizer_name == "gpt2" else [*files, tokenizer_name],
        "tokenizer": tokenizer_name,
        "vocab_size": tokenizer.vocab_size,
        "eot_token": tokenizer.eot_token,
        **({} if tokenizer_name == "gpt2" else {"tokenizer_sha256": sha256(folder / tokenizer_name)}),
        "splits": {
            split.name: {
                "documents": split.documents,
                "tokens": split.tokens,
                "bytes": split.bytes,
                "sha256": sha256(folder / f"{split.name}.safetensors"),
            }
            for split in splits
        },
        "source": source,
    }
    replace_text(folder / "meta.json", json.dumps(meta, indent=2, ensure_ascii=False) + "\n")
