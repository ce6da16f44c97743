"""Check a dataset folder against its meta.json, and summarize its contents."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.common.errors import RunError, printable
from harness.common.files import sha256
from harness.common.messages import document_count, quoted
from harness.data.dataset import SCAN_CHUNK_TOKENS, Dataset, TokenFile
from harness.data.preparation.splits import SPLITS
from harness.data.tokenizers.load import load_tokenizer
from harness.data.tokenizers.tokenizer import Tokenizer

SHOWN_LINES = 3
SHOWN_TOKENS = 400
COLUMNS = 80


@dataclass
class SplitFacts:
    """Counts from one pass over a split's tokens."""

    tokens: int = 0
    bytes: int = 0
    documents: int = 0
    largest: int = -1  # token id; -1 if there are no tokens
    longest: int = 0  # length of the longest document, in tokens


def survey(tokens: TokenFile, tokenizer: Tokenizer) -> SplitFacts:
    """Count a split's tokens, documents and bytes of text. The bytes are incomplete if a token id is beyond the
    vocabulary."""
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
    facts.longest = max(facts.longest, unfinished)  # a document without its end, which `documents` does not count
    return facts


def verify(dataset: Dataset) -> list[str]:
    """Compare every split with meta.json: hash, dtype, range of token ids, and counts. Return a line for each correct
    split. Raises RunError with everything that is wrong, UserError if a file cannot be read at all."""
    tokenizer = load_tokenizer(dataset.tokenizer)
    right: list[str] = []
    wrong = list(_tokenizer_faults(dataset, tokenizer))
    for split in SPLITS:
        if dataset.has_split(split):
            faults = list(_faults(dataset, split, tokenizer))
            wrong += [f"{dataset.split_path(split).name}: {fault}" for fault in faults]
            compared = "as meta.json says" if split in dataset.meta.splits else "but meta.json has no counts of them"
            right += [f"{split}: {len(dataset.split(split)):,} tokens, {compared}"] if not faults else []
        elif split in dataset.meta.splits:
            wrong.append(f"{split}.safetensors: missing, though meta.json counts it")
    if not right and not wrong:
        wrong.append("no train, test or validation split")
    if wrong:
        raise RunError(f"{dataset.folder}: {'; '.join(wrong)}; make or download the dataset again")
    return right


def _tokenizer_faults(dataset: Dataset, tokenizer: Tokenizer) -> Iterator[str]:
    for key, found in (("vocab_size", tokenizer.vocab_size), ("eot_token", tokenizer.eot_token)):
        said = getattr(dataset.meta, key, None)
        if said is not None and said != found:
            yield f"meta.json: {key} is {quoted(said)}, but the tokenizer has {found:,}"
    said = (dataset.meta.model_extra or {}).get("tokenizer_sha256")
    if isinstance(dataset.tokenizer, Path) and said is not None and sha256(dataset.tokenizer) != said:
        yield f"{dataset.tokenizer.name}: its SHA-256 is not the one in meta.json"


def _faults(dataset: Dataset, split: str, tokenizer: Tokenizer) -> Iterator[str]:
    said, tokens = dataset.meta.splits.get(split), dataset.split(split)
    if said is None and dataset.meta.splits:
        yield "is not in meta.json"
    if said and said.sha256 and sha256(tokens.path) != said.sha256:
        yield "its SHA-256 is not the one in meta.json"
    if dataset.meta.token_dtype not in {None, tokens.dtype}:
        yield f"holds {tokens.dtype}, but meta.json says {quoted(dataset.meta.token_dtype)}"
    facts = survey(tokens, tokenizer)
    if facts.largest >= tokenizer.vocab_size:
        yield f"token id {facts.largest} is beyond the tokenizer's {tokenizer.vocab_size:,}"
        return
    counted = {"tokens": facts.tokens, "documents": facts.documents, "bytes": facts.bytes}
    for what, number in counted.items():
        meant = getattr(said, what, None)
        if meant is not None and meant != number:
            yield f"{number:,} {what}, but meta.json says {meant:,}"


def describe(dataset: Dataset) -> Iterator[str]:
    """Yield a summary of the dataset for a terminal, line by line."""
    tokenizer = load_tokenizer(dataset.tokenizer)
    yield from textwrap.wrap(f"{dataset.name}: {printable(dataset.meta.description) or 'no description'}", COLUMNS)
    name = dataset.meta.tokenizer
    yield f"  tokenizer {printable(name)}, {tokenizer.vocab_size:,} tokens, end of text {tokenizer.eot_token}"
    for split in filter(dataset.has_split, SPLITS):
        tokens = dataset.split(split)
        facts = survey(tokens, tokenizer)
        per_token = f", {facts.bytes / facts.tokens:.2f} a token" if facts.tokens else ""
        yield ""
        yield f"{split}: {facts.tokens:,} tokens ({tokens.dtype}), {facts.bytes:,} bytes of text{per_token}"
        yield f"  {document_count(facts.documents)}, the longest with {facts.longest:,} tokens"
        text = tokenizer.decode(tokens.read(0, SHOWN_TOKENS).tolist())
        lines = [line for line in text.splitlines() if line.strip()]
        yield "  it begins:"
        yield from (f"    {printable(line)[: COLUMNS - 8]}" for line in lines[:SHOWN_LINES])
