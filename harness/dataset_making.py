"""Making a dataset folder, of text or of token shards, as prepare_datasets.py's options ask for."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.dataset_meta import write_dataset_meta
from harness.documents import TextFormat
from harness.encode import default_workers
from harness.encoder_processes import EncoderProcesses
from harness.errors import RunError, StoppedError, UserError, printable
from harness.files import version_of
from harness.preparation import Preparation, Recipe
from harness.reading_progress import ReadingProgress
from harness.splits import Shares, Split
from harness.text_sample import sample_texts
from harness.text_sources import find_source
from harness.token_shards import find_shards, import_shards
from harness.tokenizer import load_tokenizer
from harness.tokenizer_choice import TokenizerChoice
from harness.wording import listed
from harness.work_folder import WorkFolder, check_target

DECIDING_OPTIONS = (  # of the bytes of a dataset made of text
    *("text_column", "document_separator", "replace_invalid", "include", "tokenizer", "train_tokenizer"),
    *("validation_fraction", "test_fraction", "shuffle_seed"),
)


@dataclass(frozen=True)
class Made:
    """What a work folder has got, and what its meta.json has to say of it."""

    splits: list[Split]
    tokenizer: str  # "gpt2", or a file in the folder
    source: dict[str, Any]


def make_dataset(input_: str, target: Path, options: dict[str, Any]) -> list[Split]:
    """Make the dataset folder `target`, or finish one that was interrupted. `options` are those of the command.

    Raises UserError if nothing could be done, RunError and StoppedError if the same command can go on from there.
    """
    work = WorkFolder(target)
    check_target(target, overwrite=True)  # before anything is made there
    work.open()
    with _left_in_order(work):
        check_target(target, overwrite=options["overwrite"])
        made = (_from_shards if options["from_bin"] else _from_text)(input_, work, options)
        about = {"description": options["description"] or f"Tokens of {Path(input_).name}.", "source": made.source}
        tokenizer = load_tokenizer(_place(made.tokenizer, work))
        write_dataset_meta(work.dataset, made.splits, tokenizer, made.tokenizer, about)
        work.put_in_place()
    return made.splits


@contextmanager
def _left_in_order(work: WorkFolder) -> Iterator[None]:
    """A failure leaves what can be gone on from, and says so."""
    try:
        yield
    except UserError:
        work.leave()
        raise
    except KeyboardInterrupt:
        print("stopped by SIGINT; the same command goes on from there", file=sys.stderr, flush=True)
        raise StoppedError(signal.SIGINT) from None
    except OSError as error:
        where = error.filename or work.path
        raise RunError(f"{where}: {error.strerror or error}; mend that, and the same command goes on") from None


def _place(tokenizer: str, work: WorkFolder) -> str | Path:
    return tokenizer if tokenizer == "gpt2" else work.dataset / tokenizer


def _from_text(input_: str, work: WorkFolder, options: dict[str, Any]) -> Made:
    separator = options["document_separator"]
    form = TextFormat(options["text_column"], separator and _unescaped(separator), options["replace_invalid"])
    shares = Shares(options["validation_fraction"], options["test_fraction"])
    recipe = Recipe(form, shares, options["shuffle_seed"])
    fixed = {key: options[key] for key in DECIDING_OPTIONS}
    source = find_source(input_, options, work.path)
    if source.ignored:
        names = printable(listed(source.ignored))
        print(f"not read, as no text by their names, or links to folders: {names}", file=sys.stderr, flush=True)
    choice = TokenizerChoice(options["tokenizer"], options["train_tokenizer"])
    fingerprint = choice.check()
    if options["restart"]:  # only now: what the user typed makes sense
        work.clear()
    begun_with = {"input": input_, **fixed, "tokenizer_file_sha256": fingerprint}
    preparation = Preparation.begin(work, source, recipe, begun_with)
    name = choice.bring(partial(sample_texts, source, recipe), work.dataset)
    workers = options["workers"] or default_workers()
    with EncoderProcesses(_place(name, work), workers) as encoders, ReadingProgress(source.files) as progress:
        splits = preparation.run(load_tokenizer(_place(name, work)), encoders, progress.show)
    empty = preparation.journal.here.empty
    return Made(splits, name, {**source.origin, **fixed, "tokenizer": name, "empty_documents": empty})


def _from_shards(input_: str, work: WorkFolder, options: dict[str, Any]) -> Made:
    shards, choice = find_shards(input_), TokenizerChoice(options["tokenizer"], None)
    begun_with = {"input": input_, "from_bin": True, "tokenizer": choice.name, "tokenizer_file_sha256": choice.check()}
    if options["restart"]:
        work.clear()
    paths = list(itertools.chain.from_iterable(shards.values()))
    work.take_up(begun_with, [[str(path), version_of(path.stat())] for path in paths])
    name = choice.bring(list, work.dataset)  # no texts: a known one is not trained
    tokenizer = load_tokenizer(_place(name, work))
    splits = [import_shards(split, own, tokenizer, work.dataset) for split, own in sorted(shards.items())]
    return Made(splits, name, {"shards": [path.name for path in paths]})


def _unescaped(text: str) -> str:
    r"""With \n, \r, \t and \\ for what they stand for, since few shells let one type them."""
    return text.replace("\\\\", "\0").replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t").replace("\0", "\\")
