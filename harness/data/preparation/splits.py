"""Splits of a dataset: choose the documents for train, test and validation, write the splits' files, and write the
meta.json that describes them.

In the seeded order, a pseudorandom number (the draw) is computed for each document. Documents are held out in the order
of their draws until the held-out splits have their shares of the text's bytes. The shares are of bytes instead of
tokens, so that the choice does not depend on the tokenizer, which may be trained on the remaining documents. Tens of
millions of documents are not sorted. Instead, while the text is read, the few documents that may be held out are
written to a stream of their own, the pool. At the end, the pool's documents that are not held out are appended to the
training stream, in the order of their draws. The training stream then becomes the file of the train split without being
copied. All documents of a small text are in the pool, so they are all shuffled into the order of their draws.

In the given order, splits are ranges of one stream: the ranges at its end are copied to the files of the held-out
splits, and the rest is the train split. token_input.py, whose input is already split, uses only the meta.json.
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

SPLITS = ("train", "test", "validation")  # in the order of their documents in a stream
LINE_END_SEARCH = 4096  # tokens
COUNTED_AT_ONCE = 2**22  # tokens
DRAWING_KEY = 0
POOL_DOCUMENTS = 2**14  # a text of at most this many documents is all in the pool, so that its shares are met, too
POOL_SHARE = 4  # the pool's size in held-out shares; more than 1, since a few very long documents may be most of a text


@dataclass(frozen=True)
class SplitSizes:
    """Shares of the text for the held-out splits. The rest of the text is the train split."""

    validation: float = 0.01
    test: float = 0.0
    order: Literal["seeded", "given"] = "seeded"  # hold out documents by their draws, or the last ones

    def held_out(self) -> dict[str, float]:
        """Return the share of each held-out split by name, without empty splits, in the order of SPLITS."""
        return {name: share for name, share in (("test", self.test), ("validation", self.validation)) if share}

    def in_pool(self, first: int, count: int) -> np.ndarray:
        """Return (count,) bool: True for each of `count` documents, from number `first` on, that may be held out and so
        belongs to the pool."""
        share = self.validation + self.test
        limit = np.maximum(POOL_SHARE * share, POOL_DOCUMENTS / np.arange(first + 1, first + 1 + count))
        return (draws(first, count) < limit) & (self.order == "seeded")

    def choose(self, draws: np.ndarray, lengths: np.ndarray, total: int) -> dict[str, np.ndarray]:
        """Return the documents to hold out by split, as indices into `draws` and `lengths`, which describe the pool's
        documents. `total` is the length of the whole text.

        In the order of their draws, each document goes into the first split that it brings closer to its share, if
        there is one. Hence no document more than twice as long as a split is held out. Validation is the first split,
        so that adding a test split hardly changes the validation split.
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
    """Return the draws of `count` documents from number `first` on: (count,) float64, uniform in [0, 1). Documents
    without text have no number. A draw depends only on the document's number. Philox's raw words are used because they
    are the same in every version of numpy."""
    words = 4  # raw words that Philox makes from each counter value
    raw = np.random.Philox(key=DRAWING_KEY, counter=first // words).random_raw(first % words + count)
    return (raw[first % words :] >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class Split:
    """Range of a token stream, with counts of its contents. `bytes` counts UTF-8 text without end-of-text tokens."""

    name: str
    start: int
    tokens: int
    documents: int
    bytes: int
    longest_document: int = 0  # in tokens; 0 if unknown


def hold_out(pool: TokenStream, stream: TokenStream, sizes: SplitSizes, folder: Path) -> list[Split]:
    """Write the held-out splits' files from documents in the pool, and append the pool's other documents to `stream`.
    Return the splits; the first one is train, the whole stream. If a held-out or the train split would get no document,
    append all documents of the pool to `stream`, write no files, and return an empty list."""
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
    """Write a split's file with the documents at `places` in the pool, and return the split. The documents are in the
    order of their draws, so that any part of the split is a sample of the whole text."""
    tokens, length = documents[places].sum(axis=0).tolist()
    with token_file(folder / f"{name}.safetensors", pool.dtype, tokens) as file:
        copy_documents(pool.path, documents[:, 0] * pool.dtype.itemsize, places, file, HEADER_BYTES)
    return Split(name, 0, tokens, len(places), length)


def assign_splits(stream: TokenStream, sizes: SplitSizes, tokenizer: Tokenizer) -> list[Split]:
    """Return train, test and validation as ranges of the stream, in this order: the last documents are the validation
    split, and the documents before them the test split.

    If there are too few documents for that (one book), the splits are ranges of tokens that begin at the beginning of a
    line. Raises UserError if a split would have no text at all.
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
    """Return the splits as consecutive ranges of the stream, each with its number of documents in `counts`."""
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
    """Return the first position after `start` that follows the end of a line or of a document, or `start` if there is
    none within LINE_END_SEARCH tokens."""
    for at, token in enumerate(_tokens_at(stream, start, LINE_END_SEARCH).tolist(), start + 1):
        if at < stream.size.tokens and (token == tokenizer.eot_token or tokenizer.decode([token]).endswith("\n")):
            return at
    return start


def _counted(stream: TokenStream, name: str, start: int, end: int, tokenizer: Tokenizer) -> Split:
    """Return the range as a split, after counting its documents and bytes."""
    lengths = tokenizer.token_byte_lengths()
    documents = length = 0
    for at in range(start, end, COUNTED_AT_ONCE):
        tokens = _tokens_at(stream, at, min(COUNTED_AT_ONCE, end - at))
        documents += int((tokens == tokenizer.eot_token).sum())
        length += int(lengths[tokens].sum())
    return Split(name, start, max(0, end - start), documents, length)


def _tokens_at(stream: TokenStream, start: int, count: int) -> np.ndarray:
    """Return `count` tokens of the stream from `start` on, or fewer at its end."""
    count = max(0, min(count, stream.size.tokens - start))
    return np.fromfile(stream.path, stream.dtype, count, offset=HEADER_BYTES + start * stream.dtype.itemsize)


def write_splits(stream: TokenStream, splits: list[Split], folder: Path) -> None:
    """Write each split of the stream to a file in `folder`. Existing files are kept, so that an interrupted call can be
    repeated. The stream's own file becomes train.safetensors."""
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
    if not path.exists():  # last, because it cuts off the tokens of the other splits
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
    """Write `folder`/meta.json, which describes the splits. `source` says where the text came from.

    Nothing in the file depends on when or where it was made, so the same text gives the same bytes.
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
