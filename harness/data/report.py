"""Check a dataset folder against its meta.json, and summarize its contents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.common.errors import RunError, UserError, printable
from harness.common.files import sha256
from harness.common.messages import WIDTH, counted, document_count, paragraph, quoted
from harness.data.dataset import SCAN_CHUNK_TOKENS, Dataset, TokenFile
from harness.data.preparation.splits import SPLITS
from harness.data.tokenizers import Tokenizer, load_tokenizer

SHOWN_LINES = 3
SHOWN_TOKENS = 400


@dataclass
class SplitFacts:
    """Counts from one pass over a split's tokens."""

    tokens: int = 0
    bytes: int = 0  # of UTF-8 text, without end-of-text
    documents: int = 0  # number of end-of-text tokens
    largest: int = -1  # token id; -1 if there are no tokens
    longest: int = 0  # length of the longest document, in tokens


def survey(tokens: TokenFile, tokenizer: Tokenizer) -> SplitFacts:
    """Count the contents of a split. If a token id is beyond the vocabulary, the count of bytes is incomplete."""
    facts = SplitFacts(tokens=len(tokens))
    byte_lengths = tokenizer.token_byte_lengths()
    unfinished = 0  # tokens since the last end-of-text
    for at in range(0, len(tokens), SCAN_CHUNK_TOKENS):
        block = tokens.read(at, SCAN_CHUNK_TOKENS)
        facts.largest = max(facts.largest, int(block.max()))
        if facts.largest < len(byte_lengths):
            facts.bytes += int(byte_lengths[block].sum())
        ends = np.flatnonzero(block == tokenizer.eot_token)
        facts.documents += len(ends)
        facts.longest = max(facts.longest, int(np.diff(ends, prepend=-1 - unfinished).max(initial=0)))
        unfinished = len(block) - 1 - int(ends[-1]) if len(ends) else unfinished + len(block)
    facts.longest = max(facts.longest, unfinished)  # a last document without end-of-text, not counted before
    return facts


def _check_is_dataset(dataset: Dataset) -> None:
    """Raise UserError if the folder lacks meta.json or has no split."""
    # Without meta.json, the tokenizer would be taken for GPT-2's.
    has_meta = (dataset.folder / "meta.json").exists()
    if not (has_meta and any(map(dataset.has_split, SPLITS))):
        missing = "train.safetensors" if has_meta else "meta.json"
        raise UserError(
            f"{dataset.folder}: no dataset: {missing} is missing; name another folder, or make or download the dataset"
        )


def verify(dataset: Dataset) -> list[str]:
    """Compare a dataset's tokenizer and splits with meta.json, as far as meta.json describes them. Return a line of
    text for each split and one for the dataset.

    Raises RunError with a list of the faults: differences, and token ids beyond the vocabulary. Raises UserError if
    there is no dataset or a file cannot be read.
    """
    _check_is_dataset(dataset)
    meta, tokenizer = dataset.meta, load_tokenizer(dataset.tokenizer)
    right: list[str] = []
    wrong: list[str] = []
    for key in ("vocab_size", "eot_token"):
        said, found = getattr(meta, key), getattr(tokenizer, key)
        if said not in {None, found}:
            wrong.append(f"meta.json: {key} is {said}, but the tokenizer has {found}")
    tokenizer_hash = (meta.model_extra or {}).get("tokenizer_sha256")
    if tokenizer_hash is not None and isinstance(tokenizer.place, Path) and sha256(tokenizer.place) != tokenizer_hash:
        wrong.append(f"{tokenizer.place.name}: its SHA-256 is not the one in meta.json")
    for split in SPLITS:
        meant = meta.splits.get(split)
        if not dataset.has_split(split):
            wrong += [f"{split}.safetensors: missing, though meta.json lists it"] if meant else []
            continue
        tokens, faults = dataset.split(split), []
        if meant is None and meta.splits:
            faults.append("is not in meta.json")
        if meant and meant.sha256 and sha256(tokens.path) != meant.sha256:
            faults.append("its SHA-256 is not the one in meta.json")
        if meta.token_dtype not in {None, tokens.dtype}:
            faults.append(f"holds {tokens.dtype}, but meta.json says {quoted(meta.token_dtype)}")
        facts = survey(tokens, tokenizer)
        if facts.largest >= tokenizer.vocab_size:
            faults.append(f"token id {facts.largest} is not in the tokenizer's vocabulary of {tokenizer.vocab_size:,}")
        else:
            for what in ("tokens", "documents", "bytes"):
                number, expected = getattr(facts, what), getattr(meant, what, None)
                if expected not in {None, number}:
                    faults.append(f"{number:,} {what}, but meta.json says {expected:,}")
        wrong += [f"{tokens.path.name}: {fault}" for fault in faults]
        if not faults:
            compared = (
                "as meta.json says" if meant and meant.tokens is not None else "but meta.json has no counts of them"
            )
            right.append(f"{split}: {len(tokens):,} tokens, {compared}")
    if wrong:
        raise RunError(f"{dataset.folder}: {'; '.join(wrong)}; make or download the dataset again")
    return [*right, f"{dataset.folder} is complete"]


def describe(dataset: Dataset) -> Iterator[str]:
    """Yield a summary of the dataset for a terminal, line by line. Raises UserError if there is no dataset, or if a
    file cannot be read or has a token id beyond the vocabulary."""
    _check_is_dataset(dataset)
    tokenizer = load_tokenizer(dataset.tokenizer)
    yield from paragraph(f"{dataset.name}: {dataset.meta.description or 'no description'}", indent=0)
    name = dataset.meta.tokenizer
    yield f"  tokenizer {printable(name)}, {tokenizer.vocab_size:,} tokens, end of text {tokenizer.eot_token}"
    for split in filter(dataset.has_split, SPLITS):
        tokens = dataset.split(split)
        facts = survey(tokens, tokenizer)
        if facts.largest >= tokenizer.vocab_size:
            problem = f"token id {facts.largest} is not in the tokenizer's vocabulary; --verify lists all faults"
            raise UserError(f"{tokens.path}: {problem}")
        per_token = f", {facts.bytes / facts.tokens:.2f} per token" if facts.tokens else ""
        yield ""
        length = f"{counted(facts.bytes, 'byte')} of text{per_token}"
        yield f"{split}: {counted(facts.tokens, 'token')} ({tokens.dtype}), {length}"
        yield f"  {document_count(facts.documents)}, the longest with {counted(facts.longest, 'token')}"
        text = tokenizer.decode(tokens.read(0, SHOWN_TOKENS).tolist())
        lines = [line for line in text.splitlines() if line.strip()]
        yield "  it begins:"
        yield from (f"    {printable(line)[: WIDTH - 8]}" for line in lines[:SHOWN_LINES])
