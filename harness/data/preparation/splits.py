"""Splits of a dataset: choose the documents for train, test and validation, and write the splits' files and meta.json.

With `--split-order seeded`, each document has a pseudorandom number, the draw. In the order of their draws, documents
are held out until the held-out splits have about their shares of the text's bytes. While the text is read, it is
written to two streams:

- the pool: the first documents, and others with small draws. Only these may be held out.
- the training stream: all others. At the end, the rest of the pool is appended in the order of the draws.

With `--split-order given`, or if a split would get no document, splits are ranges of one stream.
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
from harness.common.messages import document_count
from harness.data.preparation.stream import (
    DOCUMENTS_PER_READ,
    HEADER_BYTES,
    TokenStream,
    copy,
    copy_documents,
    token_file,
    write_header,
)
from harness.data.tokenizers import Tokenizer

SPLITS = ("train", "test", "validation")  # in the order of their documents in a stream
LINE_END_SEARCH = 4096  # tokens
COUNTED_AT_ONCE = 2**22  # tokens
DRAWING_KEY = 0
# A text can have tens of millions of documents, too many to sort by their draws. Only the pool's are sorted.
POOL_DOCUMENTS = 2**14  # the text's first documents are all in the pool, so that small texts meet their shares
POOL_SHARE = 4  # pool's share of the documents / held-out share; above 1, since a few documents may be most of a text


@dataclass(frozen=True)
class SplitRules:
    """Rules for dividing a text into splits: the shares of the held-out splits, and the order of the documents."""

    validation: float = 0.01
    test: float = 0.0
    order: Literal["seeded", "given"] = "seeded"  # hold out in the order of draws, or the last documents
    shuffle_seed: int | None = None  # of the train split, or of all text if its end is held out; None: no shuffle

    def held_out(self) -> dict[str, float]:
        """Return the shares of the held-out splits by name, in the order of SPLITS, without shares of 0."""
        return {name: share for name, share in (("test", self.test), ("validation", self.validation)) if share}

    def in_pool(self, first: int, count: int) -> np.ndarray:
        """Return (count,) bool for the `count` documents from number `first` on: True if the document is in the pool,
        so that it may be held out. If `order` is "given", the pool is empty."""
        share = self.validation + self.test
        limit = np.maximum(POOL_SHARE * share, POOL_DOCUMENTS / np.arange(first + 1, first + 1 + count))
        return (draws(first, count) < limit) & (self.order == "seeded")

    def choose(self, draws: np.ndarray, lengths: np.ndarray, total: int) -> dict[str, np.ndarray]:
        """Return the documents to hold out in each split, as indices into `draws` and `lengths`.

        - `draws`, `lengths`: draw and length of each document of the pool, (documents,) each.
        - `total`: length of the whole text. All lengths are in bytes.
        """
        # Bytes instead of tokens, so that the choice does not depend on the tokenizer, which may be trained on the
        # remaining documents. Validation is first, so that adding a test split hardly changes the validation split.
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
    """Return the draw of each of `count` documents from number `first` on: (count,) float64, uniform in [0, 1).

    A draw is a pseudorandom number that depends only on the document's number. Documents without text, or left out by
    --exclude, have no number.
    """
    words = 4  # raw words that Philox makes from each counter value
    # Raw words are the same in every version of numpy.
    raw = np.random.Philox(key=DRAWING_KEY, counter=first // words).random_raw(first % words + count)
    return (raw[first % words :] >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class Split:
    """Split with counts of its contents. Its tokens begin at position `start` of a token stream, or of a file of its
    own. `bytes` counts UTF-8 text without end-of-text tokens."""

    name: str
    start: int
    tokens: int
    documents: int
    bytes: int
    longest_document: int = 0  # in tokens; 0 if unknown


def hold_out(pool: TokenStream, stream: TokenStream, rules: SplitRules, folder: Path) -> list[Split]:
    """Choose documents for the held-out splits from `pool`, and write these splits' files to `folder`. Return the
    splits, train first.

    `stream` must be open, and has the rest of the text. The pool's other documents are appended to `stream`, which is
    then the train split. If a split would get no document, append the whole pool to `stream`, write no files, and
    return an empty list.
    """
    documents, others = pool.documents(), stream.documents()
    length = int(documents[:, 1].sum() + others[:, 1].sum())
    total = (pool.size + stream.size).documents
    parts = [(at, min(DOCUMENTS_PER_READ, total - at)) for at in range(0, total, DOCUMENTS_PER_READ)]
    drawn = np.concatenate([draws(*part)[rules.in_pool(*part)] for part in parts])
    chosen = rules.choose(drawn, documents[:, 1], length)
    order = np.argsort(drawn, kind="stable")
    left = order[~np.isin(order, np.concatenate([np.zeros(0, np.int64), *chosen.values()]))]
    if not (all(map(len, chosen.values())) and stream.size.documents + len(left)):
        stream.append_documents(pool, np.arange(len(documents)))
        return []
    splits = []
    for name in rules.held_out():
        tokens, split_length = documents[chosen[name]].sum(axis=0).tolist()
        with token_file(folder / f"{name}.safetensors", pool.dtype) as file:
            # In the order of the draws, so that any part of the split is a sample of the whole text.
            copy_documents(pool.path, documents[:, 0] * pool.dtype.itemsize, chosen[name], file)
        splits.append(Split(name, 0, tokens, len(chosen[name]), split_length))
        length -= split_length
    longest = max(int(sizes[:, 0].max(initial=0)) for sizes in (documents[left], others))
    stream.append_documents(pool, left)
    return [Split("train", 0, stream.size.tokens, stream.size.documents, length, longest), *splits]


def assign_splits(stream: TokenStream, rules: SplitRules, tokenizer: Tokenizer) -> list[Split]:
    """Return train, test and validation as ranges of the stream, in this order, without splits whose share is 0. The
    shares are of the number of documents. If a split would get no document, they are approximate shares of the
    bytes, or of the tokens if `rules.order` is "given". Raises UserError if a split would have no text."""
    size, shares = stream.size, rules.held_out()
    counts = [round(share * size.documents) for share in shares.values()]
    names, counts = ["train", *shares], [size.documents - sum(counts), *counts]
    if min(counts) > 0:
        of_splits = np.split(stream.documents(), np.cumsum(counts)[:-1])
        totals = np.array([sizes.sum(axis=0) for sizes in of_splits])
        starts = np.cumsum(totals[:, 0]) - totals[:, 0]
        found = zip(names, starts.tolist(), counts, totals.tolist(), strict=True)
        splits = [Split(name, start, tokens, count, length) for name, start, count, (tokens, length) in found]
    else:
        held, lengths = list(shares.values()), tokenizer.token_byte_lengths()
        lengths[tokenizer.eot_token] = 1
        if rules.order == "given":
            lengths[:] = 1  # earlier versions, which had only this order, took shares of the tokens
        blocks = range(0, size.tokens, COUNTED_AT_ONCE)
        total = sum(int(lengths[stream.read(at, COUNTED_AT_ONCE)].sum()) for at in blocks)
        wanted = [_token_at(stream, total - round(sum(held[at:]) * total), lengths) for at in range(len(held))]
        bounds = [0, *(_next_line(stream, at, tokenizer) for at in wanted), size.tokens]
        splits = [_counted(stream, name, bounds[at], bounds[at + 1], tokenizer) for at, name in enumerate(names)]
    for split in splits:
        if not split.bytes:
            is_train = split.name not in shares  # train gets the rest, and has no fraction of its own
            change = "smaller fractions for other splits" if is_train else f"a larger --{split.name}-fraction"
            raise UserError(
                f"{split.name} would be empty: there are {size.tokens:,} tokens, {document_count(size.documents)}; "
                f"with --restart, give more text, or {change}"
            )
    return splits


def _token_at(stream: TokenStream, place: int, lengths: np.ndarray) -> int:
    """Return the position of the first token that begins at byte `place` or later, or the number of tokens if there
    is none. Token id i counts as `lengths[i]` bytes."""
    before = 0
    for at in range(0, stream.size.tokens, COUNTED_AT_ONCE):
        of_tokens = lengths[stream.read(at, COUNTED_AT_ONCE)]
        starts = before + np.cumsum(of_tokens) - of_tokens
        if starts[-1] >= place:
            return at + int(np.searchsorted(starts, place))
        before += int(of_tokens.sum())
    return stream.size.tokens


def _next_line(stream: TokenStream, start: int, tokenizer: Tokenizer) -> int:
    """Return the first position from `start` on that follows the end of a line or of a document, or `start` if none is
    within LINE_END_SEARCH tokens. A position does not count if the rest of the stream is white space."""
    first = max(0, start - 1)
    tokens = stream.read(first, LINE_END_SEARCH + start - first).tolist()
    texts = ["\n" if token == tokenizer.eot_token else tokenizer.decode([token]) for token in tokens]
    if first + len(texts) == stream.size.tokens:
        while texts and not texts[-1].strip():
            texts.pop()
        texts = texts[:-1]  # the token left out here has the stream's last text
    return next((at for at, text in enumerate(texts, first + 1) if text.endswith("\n")), start)


def _counted(stream: TokenStream, name: str, start: int, end: int, tokenizer: Tokenizer) -> Split:
    """Count the documents and bytes of text from token `start` to token `end`, and return this range as a split."""
    lengths = tokenizer.token_byte_lengths()
    documents = length = 0
    for at in range(start, end, COUNTED_AT_ONCE):
        tokens = stream.read(at, min(COUNTED_AT_ONCE, end - at))
        documents += int((tokens == tokenizer.eot_token).sum())
        length += int(lengths[tokens].sum())
    return Split(name, start, max(0, end - start), documents, length)


def write_splits(stream: TokenStream, splits: list[Split], folder: Path) -> None:
    """Write each split of the stream to a file in `folder`. `splits` begins with the train split, the beginning of the
    stream. The stream's own file becomes train.safetensors. Existing files are kept, so an interrupted call can be
    repeated."""
    train, *others = splits
    width = stream.dtype.itemsize
    for split in others:
        path = folder / f"{split.name}.safetensors"
        if not path.exists():
            with token_file(path, stream.dtype) as file, stream.path.open("rb") as source:
                source.seek(HEADER_BYTES + split.start * width)
                copy(source, file, split.tokens * width)
    sync(folder)
    path = folder / "train.safetensors"
    if not path.exists():  # last, because write_header cuts off the other splits' tokens
        write_header(stream.path, stream.dtype, train.tokens)
        stream.path.rename(path)


def write_dataset_meta(
    folder: Path, splits: Sequence[Split], tokenizer: Tokenizer, description: str, source: Mapping[str, object]
) -> None:
    """Write `folder`/meta.json, which describes the splits and the tokenizer. Their files must be in `folder`. `source`
    is the origin of the text. The same files and arguments give the same bytes."""
    paths = [folder / f"{split.name}.safetensors" for split in splits]
    own = {} if tokenizer.place == "gpt2" else {"tokenizer_sha256": Path(tokenizer.place)}
    meta = {
        "description": description,
        "token_dtype": tokenizer.dtype.name,
        "files": [path.name for path in (*paths, *own.values())],
        "tokenizer": Path(tokenizer.place).name,
        "vocab_size": tokenizer.vocab_size,
        "eot_token": tokenizer.eot_token,
        **{key: sha256(path) for key, path in own.items()},
        "splits": {
            split.name: {key: getattr(split, key) for key in ("documents", "tokens", "bytes")}
            | {"sha256": sha256(path)}
            for split, path in zip(splits, paths, strict=True)
        },
        "source": source,
    }
    replace_text(folder / "meta.json", json.dumps(meta, indent=2, ensure_ascii=False) + "\n")
