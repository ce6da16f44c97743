"""Make a dataset folder from text or from token shards, according to the options of prepare_datasets.py."""

from __future__ import annotations

import io
import itertools
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from harness.common.errors import RunError, RunStopped, UserError, place_of, printable
from harness.common.files import version_of
from harness.common.libraries import usable_cores
from harness.common.messages import abbreviated, is_hub_name
from harness.data.preparation.encode import Encoded, encoder_processes
from harness.data.preparation.new_tokenizer import bring_tokenizer, check_tokenizer, sample_texts
from harness.data.preparation.pipeline import Preparation, Recipe, Show
from harness.data.preparation.splits import Split, SplitSizes, write_dataset_meta
from harness.data.preparation.stream import StreamSize
from harness.data.preparation.text_input import TextFile, TextFormat, TextSource, find_text, short_name
from harness.data.preparation.token_input import find_shards, import_shards
from harness.data.preparation.work import WorkFolder, check_target
from harness.data.tokenizers.bpe import train_bpe
from harness.data.tokenizers.load import load_tokenizer
from harness.data.tokenizers.tokenizer import Tokenizer

SECONDS_BETWEEN_LINES = 10.0
BYTES_PER_WORKER = 2**22  # of input; fewer bytes are encoded before another process has started
BAR_FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
LINE_FORMAT = "{percentage:3.0f}% {elapsed}<{remaining}{postfix}"

# The splits, the tokenizer, its name in meta.json, and "source" in meta.json: where the text or the tokens came from.
Made = tuple[list[Split], Tokenizer, str, dict[str, Any]]


def make_dataset(inputs: Sequence[str], target: Path, options: Mapping[str, Any]) -> tuple[list[Split], int]:
    """Make the dataset folder `target`, or resume its interrupted preparation. Return the splits and the vocabulary
    size.

    `options` are the options of prepare_datasets.py by name. Raises UserError if an option or the input is wrong,
    RunError or RunStopped if the same command can resume the work later.
    """
    work = WorkFolder(target)
    check_target(target, overwrite=True)  # before `work.open` creates folders
    work.open()
    try:
        check_target(target, overwrite=options["overwrite"])
        make = _from_shards if options["from_bin"] else _from_text
        splits, tokenizer, name, source = make(inputs, work, options)
        description = options["description"] or f"Tokens of {short_name(inputs)}."
        write_dataset_meta(work.dataset, splits, tokenizer, name, description=description, source=source)
        work.put_in_place()
        return splits, tokenizer.vocab_size
    except UserError:
        work.leave()
        raise
    except KeyboardInterrupt:
        print("stopped by SIGINT; to continue, run the same command again", file=sys.stderr, flush=True)
        raise RunStopped(signal.SIGINT) from None
    except OSError as error:
        where = place_of(error) or work.path
        raise RunError(f"{where}: {error.strerror or error}; correct that and run the same command again") from None


def _from_text(inputs: Sequence[str], work: WorkFolder, options: Mapping[str, Any]) -> Made:
    form = TextFormat(
        options["text_column"],
        _unescaped(options["document_separator"] or "") or None,
        "replace" if options["replace_invalid"] else "strict",
    )
    sizes = SplitSizes(options["validation_fraction"], options["test_fraction"], options["split_order"])
    recipe = Recipe(form, sizes, options["shuffle_seed"])
    source = _find_source(inputs, options, work.path)
    if source.ignored:
        names = printable(abbreviated(source.ignored))
        print(
            f"not read (not named as text, or links to folders; a glob takes any name): {names}",
            file=sys.stderr,
            flush=True,
        )
    fingerprint = check_tokenizer(options["tokenizer"])
    # The options that determine the bytes of the dataset. Interrupted work resumes only with the same values of these.
    keys = [
        *("text_column", "document_separator", "replace_invalid", "include", "tokenizer", "train_tokenizer"),
        *("validation_fraction", "test_fraction", "split_order", "shuffle_seed"),
    ]
    deciding = {key: options[key] for key in keys} | {"include": list(options["include"])}
    if options["replace_invalid"]:
        deciding["replace_invalid"] = "any"
    if options["split_order"] == "given":
        del deciding["split_order"]  # earlier versions had only this order, and recorded no key for it
    begun_with = {"input": abbreviated(inputs), **deciding, "tokenizer_file_sha256": fingerprint}
    files = [[file.name, file.version] for file in source.files]
    journal = work.resume_or_begin(begun_with, files, restart=options["restart"])
    vocab_size = options["train_tokenizer"]

    def train(path: Path) -> None:
        train_bpe(iter(sample_texts(source, recipe)), vocab_size, path)

    name = bring_tokenizer(options["tokenizer"] or "gpt2", work.dataset, train if vocab_size else None)
    size = sum(file.size for file in source.files)
    place, workers = _place(name, work), options["workers"] or min(usable_cores(), 1 + size // BYTES_PER_WORKER)
    with encoder_processes(place, workers) as encoder, reading_progress(source.files) as show:
        try:
            tokenizer = load_tokenizer(place)
        except UserError as error:
            hint = "; or give --train-tokenizer 4096, which needs no network" if name == "gpt2" else ""
            raise UserError(f"{error}{hint}") from None
        splits = Preparation(work, source, recipe, journal).run(tokenizer, encoder, workers, show)
    empty = journal.here.empty
    return splits, tokenizer, name, {**source.origin, **deciding, "tokenizer": name, "empty_documents": empty}


def _find_source(inputs: Sequence[str], options: Mapping[str, Any], work: Path) -> TextSource:
    """Return the local files that `inputs` names, or the files of the Hub dataset of that name if there are no such
    local files. Raises UserError if there is neither."""
    if len(inputs) == 1 and not Path(inputs[0]).exists() and is_hub_name(inputs[0]):
        from harness.data.preparation.hub_source import find_on_hub

        downloads = work / "downloads" if options["delete_after"] else None
        return find_on_hub(inputs[0], options["include"], options["revision"], downloads)
    for option in ("include", "revision", "delete_after"):
        if options[option]:
            name = f"--{option.replace('_', '-')}"
            raise UserError(f"{name} belongs with a dataset on the Hub, but {inputs[0]} is local")
    return find_text(inputs)


def _from_shards(inputs: Sequence[str], work: WorkFolder, options: Mapping[str, Any]) -> Made:
    keys, given = ("from_bin", "token_dtype", "tokenizer"), options["tokenizer"]
    deciding = {key: options[key] for key in keys}
    begun_with = {"input": abbreviated(inputs), **deciding, "tokenizer_file_sha256": check_tokenizer(given)}
    by_split = find_shards(inputs, options["token_dtype"])
    shards = list(itertools.chain.from_iterable(by_split.values()))
    if untold := [shard for shard in shards if not shard.is_told]:
        names = printable(abbreviated([shard.path.name for shard in untold]))
        what = f"{untold[0].dtype.name} tokens of {printable(options['tokenizer'] or 'GPT-2')}"
        print(f"no header, read as {what} (--token-dtype, --tokenizer): {names}", file=sys.stderr, flush=True)
    files = [[str(shard.path), version_of(shard.path.stat())] for shard in shards]
    work.resume_or_begin(begun_with, files, restart=options["restart"])
    name = bring_tokenizer(given or "gpt2", work.dataset)
    tokenizer = load_tokenizer(_place(name, work))
    splits = [import_shards(split, own, tokenizer, work.dataset) for split, own in sorted(by_split.items())]
    return splits, tokenizer, name, {"shards": [shard.path.name for shard in shards]}


def _place(tokenizer: str, work: WorkFolder) -> str | Path:
    return tokenizer if tokenizer == "gpt2" else work.dataset / tokenizer


def _unescaped(text: str) -> str:
    r"""Replace \n, \r, \t and \\ by the characters that they stand for, because most shells pass them unchanged."""
    return text.replace("\\\\", "\0").replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t").replace("\0", "\\")


@contextmanager
def reading_progress(files: Sequence[TextFile]) -> Iterator[Show]:
    """Yield a function that is called with each encoded batch and the total size so far, and reports documents, tokens,
    tokens/s and the time left. On a terminal it draws a bar of the input bytes that have been read; elsewhere it prints
    a line every SECONDS_BETWEEN_LINES."""
    before = [0, *itertools.accumulate(file.size for file in files)]
    is_terminal, began = sys.stderr.isatty(), time.monotonic()
    shape: dict[str, Any] = {"bar_format": BAR_FORMAT, "dynamic_ncols": True}
    if not is_terminal:
        shape = {"bar_format": LINE_FORMAT, "file": io.StringIO(), "mininterval": SECONDS_BETWEEN_LINES}
    with tqdm(total=before[-1], **shape) as bar:
        shown, first_tokens = began, -1  # first_tokens: tokens of an earlier process, set by the first batch

        def show(encoded: Encoded, size: StreamSize) -> None:
            nonlocal shown, first_tokens
            now, position = time.monotonic(), before[encoded.batch.file] + encoded.batch.position
            if first_tokens < 0:
                bar.initial, first_tokens = position, size.tokens
            speed = (size.tokens - first_tokens) / max(now - began, 1e-9)
            counts = [tqdm.format_sizeof(each) for each in (size.documents, size.tokens, speed)]
            bar.set_postfix_str("{} documents, {} tokens, {} tokens/s".format(*counts), refresh=False)
            bar.update(position - bar.n)
            if not is_terminal and now - shown >= SECONDS_BETWEEN_LINES:
                shown = now
                print(bar, flush=True)

        yield show
