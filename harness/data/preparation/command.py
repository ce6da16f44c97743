"""Make a dataset folder from text or from token shards, according to the options of prepare_datasets.py."""

from __future__ import annotations

import glob
import io
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from harness.common.errors import EXIT, RunError, UserError, explained, place_of, printable
from harness.common.files import version_of
from harness.common.libraries import usable_cores
from harness.common.messages import abbreviated, counted, is_hub_name, tell
from harness.data.preparation.encode import Encoded, batches, encode_batches, encode_texts, encoder_processes
from harness.data.preparation.new_tokenizer import check_tokenizer, sample_texts, write_tokenizer
from harness.data.preparation.splits import (
    Split,
    SplitRules,
    assign_splits,
    hold_out,
    write_dataset_meta,
    write_splits,
)
from harness.data.preparation.stream import StreamSize, TokenStream, shuffle
from harness.data.preparation.text_input import TextFile, TextFormat, TextSource, find_text, short_name
from harness.data.preparation.token_input import find_shards, import_shards
from harness.data.preparation.work import Mark, Phase, WorkFolder, check_target
from harness.data.tokenizers import Tokenizer, load_tokenizer, train_bpe

COMMIT_TOKENS = 2**24  # tokens between two saves of the journal; encoding them takes some seconds
SECONDS_BETWEEN_LINES = 10.0
BYTES_PER_WORKER = 2**22  # of input; starting a process takes longer than encoding fewer bytes
BAR_FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
LINE_FORMAT = "{percentage:3.0f}% {elapsed}<{remaining}{postfix}"
# Options that determine the splits and the tokenizer; `_deciding` adds others if they are given.
DECIDING = (
    *("text_column", "document_separator", "replace_invalid", "include", "tokenizer", "train_tokenizer"),
    *("validation_fraction", "test_fraction", "split_order", "shuffle_seed"),
)

# Result of a preparation: the splits, the tokenizer, and the value of "source" in meta.json, which says where the text
# or the tokens came from.
Made = tuple[list[Split], Tokenizer, dict[str, Any]]
Show = Callable[[Encoded, StreamSize], None]


class HeldOut(Protocol):
    """Held-out text. Documents that overlap with it too much are left out of the dataset that is being made.
    Implemented by harness/data/overlap.py, which this package must not import."""

    described: list[list[str]]

    def without_held_out(self, batches: Iterable[Encoded], tokenizer: Tokenizer) -> Iterator[Encoded]: ...


def make_dataset(
    inputs: Sequence[str], target: Path, options: Mapping[str, Any], held_out: HeldOut | None = None
) -> tuple[list[Split], int]:
    """Make the dataset folder `target`, or resume its interrupted preparation. Return the splits and the vocabulary
    size.

    `inputs` are files, folders and globs, or the name of one Hub dataset. `options` are the options of
    prepare_datasets.py by name. Raises UserError or RunError if an option, the input or `target` cannot be used. After
    KeyboardInterrupt or RunError, the same command can be run again, with --restart if the message asks for it.
    """
    work = WorkFolder(target)
    check_target(target, overwrite=True)  # before `work.open` creates folders
    work.open()
    try:
        check_target(target, overwrite=options["overwrite"])
        made = (
            _from_shards(inputs, work, options) if options["from_bin"] else _from_text(inputs, work, options, held_out)
        )
        splits, tokenizer, source = made
        named = "files named " if any(map(glob.has_magic, inputs)) else ""
        description = options["description"] or f"Tokens of {named}{short_name(inputs)}."
        write_dataset_meta(work.dataset, splits, tokenizer, description, source)
        work.put_in_place()
        return splits, tokenizer.vocab_size
    except UserError:
        work.leave()
        raise
    except OSError as error:
        where = place_of(error) or work.path
        raise RunError(f"{where}: {error.strerror or error}; correct that and {EXIT.again}") from None


def _from_text(inputs: Sequence[str], work: WorkFolder, options: Mapping[str, Any], held_out: HeldOut | None) -> Made:
    """Tokenize text, and write the files of the splits and of the tokenizer to `work.dataset`."""
    separator = options["document_separator"] or ""
    for escape, character in (("\\\\", "\0"), ("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t"), ("\0", "\\")):
        separator = separator.replace(escape, character)  # most shells do not replace these escapes
    form = TextFormat(options["text_column"], separator or None, "replace" if options["replace_invalid"] else "strict")
    shares = options["validation_fraction"], options["test_fraction"]
    rules = SplitRules(*shares, options["split_order"], options["shuffle_seed"])
    source = _find_source(inputs, options, work)
    tokenizer_sha256 = check_tokenizer(options["tokenizer"])
    deciding = _deciding(options, held_out)
    begun_with = {"input": abbreviated(inputs), **deciding, "tokenizer_file_sha256": tokenizer_sha256}
    files = [[file.name, file.version] for file in source.files]
    journal = work.resume_or_begin(begun_with, files, restart=options["restart"])
    if journal.phase == "reading" or not journal.origin:
        journal.origin = dict(source.origin)

    def train(path: Path) -> None:
        texts = sample_texts(source, form, rules)
        if not texts:
            raise UserError(f"{source.name}: no documents with text to train a tokenizer on; give other text")
        train_bpe(iter(texts), options["train_tokenizer"], path, options["special_token"])

    place = write_tokenizer(options["tokenizer"] or "gpt2", work.dataset, train if options["train_tokenizer"] else None)
    size = sum(file.size for file in source.files)
    workers = options["workers"] or min(usable_cores(), 1 + size // BYTES_PER_WORKER)
    with encoder_processes(workers if journal.phase == "reading" else 1) as executor:
        hint = "; or give --train-tokenizer 4096, which needs no network" if place == "gpt2" else ""
        with explained(after=hint):
            tokenizer = load_tokenizer(place)
        text, pool = (TokenStream(work.path / f"{name}.tokens", tokenizer.dtype) for name in ("text", "pool"))
        if journal.phase == "reading":
            pieces = source.read(form, journal.here.file, journal.here.documents)
            in_batches = batches(pieces, journal.here.file, journal.here.documents)
            sent = tokenizer if workers == 1 else place  # each process loads the tokenizer itself
            encoded = encode_batches(in_batches, lambda texts: executor.submit(encode_texts, sent, texts), workers)
            if held_out:
                encoded = held_out.without_held_out(encoded, tokenizer)
            with reading_progress(source.files, journal.here) as show:
                most = StreamSize(options["max_documents"] or sys.maxsize, options["max_tokens"] or sys.maxsize)
                _tokenize(encoded, text, pool, rules, most, work, show)
    empty, left_out = journal.here.empty, journal.here.left_out
    if not journal.here.total.documents:
        excluded = f", {left_out:,} are left out by --exclude" if left_out else ""
        raise UserError(f"{source.name}: no documents with text ({empty:,} are empty{excluded}); give other text")
    _arrange(text, pool, rules, tokenizer, work)
    made_from = {**journal.origin, **deciding, "tokenizer": Path(tokenizer.place).name, "empty_documents": empty}
    if held_out:
        made_from["excluded_documents"] = left_out
        print(f"{counted(left_out, 'document')} left out by --exclude {abbreviated(options['exclude'])}", flush=True)
    return journal.splits, tokenizer, made_from


def _deciding(options: Mapping[str, Any], held_out: HeldOut | None) -> dict[str, Any]:
    """Return the options that decide the contents of the dataset, in the form in which the journal records them."""
    deciding = {key: options[key] for key in DECIDING} | {"include": list(options["include"])}
    if options["replace_invalid"]:
        deciding["replace_invalid"] = "any"  # earlier versions wrote this value
    deciding |= {key: options[key] for key in ("max_documents", "max_tokens") if options[key] is not None}
    if options["special_token"]:
        deciding["special_token"] = list(options["special_token"])
    if held_out:
        deciding["exclude"] = held_out.described
    if options["split_order"] == "given":
        del deciding["split_order"]  # earlier versions had only this order, and wrote no such key
    return deciding


def _find_source(inputs: Sequence[str], options: Mapping[str, Any], work: WorkFolder) -> TextSource:
    """Return the local files that `inputs` names. If `inputs` is a single name that is no local path but can be a
    dataset on the Hub, return the files of that dataset."""
    if len(inputs) == 1 and not Path(inputs[0]).exists() and is_hub_name(inputs[0]):
        from harness.data.preparation.hub_source import find_on_hub

        downloads = work.path / "downloads" if options["delete_after"] else None
        return find_on_hub(inputs[0], options["include"], options["revision"], downloads)
    for option in ("include", "revision", "delete_after"):
        if options[option]:
            name = f"--{option.replace('_', '-')}"
            raise UserError(f"{name} needs a Hub dataset as the only INPUT, not {abbreviated(inputs)}; omit {name}")
    return find_text(inputs)


def _tokenize(
    batches: Iterator[Encoded],
    text: TokenStream,
    pool: TokenStream,
    rules: SplitRules,
    most: StreamSize,
    work: WorkFolder,
    show: Show,
) -> None:
    """Write to `pool` the tokens of documents that may be held out, and to `text` the tokens of all other documents.
    The document with which `most` is reached is the last one that is written. `work.journal` records the progress."""
    journal = work.journal
    text.open_at(journal.here.size)
    pool.open_at(journal.here.pool)

    def save(phase: Phase) -> None:
        text.flush()
        pool.flush()
        work.save(phase)

    here, committed = journal.here, journal.here.total.tokens  # `here` moves with each batch, even inside a document
    is_open = False  # True if the last document continues in the next batch
    try:
        for encoded in batches:
            batch = encoded.batch
            numbers = np.cumsum(encoded.ends) - encoded.ends  # number of each piece's document within the batch
            in_pool = rules.in_pool(here.total.documents, len(numbers))[numbers]
            wanted = _begin_within(most, here.total, encoded.sizes[:, 0], numbers, is_open=is_open)
            text.append(encoded, ~in_pool & wanted)
            pool.append(encoded, in_pool & wanted)
            empty, left_out = here.empty + batch.empty, here.left_out + encoded.left_out
            here = Mark(batch.file, batch.documents, empty, left_out, text.size, pool.size)
            is_open = len(encoded.ends) > 0 and not encoded.ends[-1]
            if not wanted.all():
                journal.here = here
                break
            if not batch.pieces or batch.pieces[-1].ends:  # work can be resumed only at the end of a document
                journal.here = here
                if not batch.documents:
                    journal.file_start = here
                if here.total.tokens - committed >= COMMIT_TOKENS:
                    save("reading")
                    committed = here.total.tokens
            show(encoded, here.total)
        save("read")
    except (UserError, RunError, KeyboardInterrupt):
        with suppress(OSError):
            save("reading")
        raise
    finally:
        text.close()
        pool.close()


def _begin_within(
    most: StreamSize, total: StreamSize, tokens: np.ndarray, numbers: np.ndarray, *, is_open: bool
) -> np.ndarray:
    """Return (pieces,) bool: True for all pieces of each document that begins before `most` is reached.

    - `total`: documents and tokens before the batch.
    - `tokens`: number of tokens of each piece.
    - `numbers`: index of each piece's document in the batch.
    - `is_open`: True if document 0 has begun in an earlier batch. The result is then True for its pieces.
    """
    before = np.cumsum(tokens) - tokens + total.tokens
    at_start = before[np.searchsorted(numbers, numbers)]  # tokens before the first piece of each piece's document
    within = (at_start < most.tokens) & (total.documents + numbers < most.documents)
    return within | ((numbers == 0) & is_open)


def _arrange(text: TokenStream, pool: TokenStream, rules: SplitRules, tokenizer: Tokenizer, work: WorkFolder) -> None:
    """Divide the text into splits and shuffle it, both by `rules`, and write the files of the splits. `text` and
    `pool` are those that `_tokenize` has written. Afterwards, `work.journal` has the splits."""
    journal = work.journal
    if journal.phase == "read":
        pool.size = journal.here.pool
        text.open_at(journal.here.size)
        if rules.order == "seeded":
            journal.splits = hold_out(pool, text, rules, work.dataset)
        text.flush()
        text.close()
        journal.here = replace(journal.here, size=text.size, pool=StreamSize())
        work.save("held out")
        pool.delete()  # its files are missing if an earlier version began the work
    text.size = journal.here.size
    if rules.shuffle_seed is not None:
        shuffled = TokenStream(work.path / "shuffled.tokens", text.dtype)
        if journal.phase == "held out":
            shuffle(text, shuffled, rules.shuffle_seed)
            work.save("shuffled")
        text.delete()
        text, shuffled.size = shuffled, text.size
    if journal.phase != "shared out":
        journal.splits = journal.splits or assign_splits(text, rules, tokenizer)
        work.save("shared out")
    write_splits(text, journal.splits, work.dataset)


def _from_shards(inputs: Sequence[str], work: WorkFolder, options: Mapping[str, Any]) -> Made:
    """Write the tokens of token shards to the files of the splits in `work.dataset`, and write the tokenizer's file."""
    given = options["tokenizer"]
    deciding = {key: options[key] for key in ("from_bin", "token_dtype", "tokenizer")}
    begun_with = {"input": abbreviated(inputs), **deciding, "tokenizer_file_sha256": check_tokenizer(given)}
    by_split = find_shards(inputs, options["token_dtype"])
    shards = list(itertools.chain.from_iterable(by_split.values()))
    if headerless := [shard for shard in shards if not shard.has_header]:
        names = printable(abbreviated([shard.path.name for shard in headerless]))
        what = f"{headerless[0].dtype.name} tokens of {printable(given or 'GPT-2')}"
        tell(f"{names}: no header, so read as {what}; --token-dtype and --tokenizer change that")
    files = [[str(shard.path), version_of(shard.path.stat())] for shard in shards]
    work.resume_or_begin(begun_with, files, restart=options["restart"])
    tokenizer = load_tokenizer(write_tokenizer(given or "gpt2", work.dataset))
    splits = [import_shards(split, own, tokenizer, work.dataset) for split, own in sorted(by_split.items())]
    return splits, tokenizer, {"shards": [shard.path.name for shard in shards]}


@contextmanager
def reading_progress(files: Sequence[TextFile], begin: Mark) -> Iterator[Show]:
    """Yield a function that shows the progress. Call the function with each encoded batch and the size of the output so
    far. If standard error is a terminal, the function draws a bar. If not, it prints lines to standard output."""
    before = [0, *itertools.accumulate(file.size for file in files)]
    is_terminal = sys.stderr.isatty()
    shape: dict[str, Any] = {"bar_format": BAR_FORMAT, "dynamic_ncols": True}
    if not is_terminal:
        shape = {"bar_format": LINE_FORMAT, "file": io.StringIO(), "mininterval": SECONDS_BETWEEN_LINES, "miniters": 0}
    with tqdm(total=before[-1], disable=False, **shape) as bar:  # with TQDM_DISABLE=1, `bar` would have no `initial`

        def show(encoded: Encoded, size: StreamSize) -> None:
            elapsed, position = bar.format_dict["elapsed"], before[encoded.batch.file] + encoded.batch.position
            bar.initial = bar.initial or position  # the time left is estimated from the first batch of this process on
            numbers = size.documents, size.tokens, (size.tokens - begin.total.tokens) / max(elapsed, 1e-9)
            documents, tokens, speed = (f"{each:.0f}" if each < 1000 else tqdm.format_sizeof(each) for each in numbers)
            bar.set_postfix_str(f"{documents} documents, {tokens} tokens, {speed} tokens/s", refresh=False)
            was_due = bar.update(position - bar.n)  # true once in `mininterval`
            if was_due and not is_terminal:
                print(bar, flush=True)

        yield show
