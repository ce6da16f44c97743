"""Making a dataset folder, of text or of token shards, as prepare_datasets.py's options ask for."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.common.errors import RunError, RunStopped, UserError, place_of, printable
from harness.common.files import version_of
from harness.common.libraries import usable_cores
from harness.common.messages import abbreviated
from harness.data.preparation.encoder_processes import EncoderProcesses
from harness.data.preparation.new_tokenizer import TokenizerChoice, sample_texts
from harness.data.preparation.options import PreparationOptions, Recorded
from harness.data.preparation.pipeline import Preparation, Recipe
from harness.data.preparation.progress import ReadingProgress
from harness.data.preparation.sources import find_source, short_name
from harness.data.preparation.splits import About, Split, SplitSizes, write_dataset_meta
from harness.data.preparation.token_shards import check_token_ids, find_shards, import_shards
from harness.data.preparation.work_folder import WorkFolder, check_target
from harness.data.tokenizers.load import load_tokenizer


@dataclass(frozen=True)
class Made:
    """Contents of a work folder's dataset, as its meta.json describes them."""

    splits: list[Split]
    tokenizer: str  # "gpt2", or a file in the folder
    vocab_size: int
    source: dict[str, Recorded]  # where its content came from


def make_dataset(inputs: Sequence[str], target: Path, options: PreparationOptions) -> Made:
    """Make the dataset folder `target`, or finish one that was interrupted.

    Raises UserError if nothing could be done, RunError and RunStopped if the same command can go on from there.
    """
    work = WorkFolder(target)
    check_target(target, overwrite=True)  # before anything is made there
    work.open()
    with _left_in_order(work):
        check_target(target, overwrite=options.overwrite)
        made = (_from_shards if options.from_bin else _from_text)(inputs, work, options)
        about = About(options.description or f"Tokens of {short_name(inputs)}.", made.source)
        tokenizer = load_tokenizer(_place(made.tokenizer, work))
        write_dataset_meta(work.dataset, made.splits, tokenizer, made.tokenizer, about)
        work.put_in_place()
    return made


@contextmanager
def _left_in_order(work: WorkFolder) -> Iterator[None]:
    """Leave work that can be resumed after a failure, and say so."""
    try:
        yield
    except UserError:
        work.leave()
        raise
    except KeyboardInterrupt:
        print("stopped by SIGINT; the same command goes on from there", file=sys.stderr, flush=True)
        raise RunStopped(signal.SIGINT) from None
    except OSError as error:
        where = place_of(error) or work.path
        raise RunError(f"{where}: {error.strerror or error}; mend that, and the same command goes on") from None


def _place(tokenizer: str, work: WorkFolder) -> str | Path:
    return tokenizer if tokenizer == "gpt2" else work.dataset / tokenizer


def _from_text(inputs: Sequence[str], work: WorkFolder, options: PreparationOptions) -> Made:
    sizes = SplitSizes(options.validation_fraction, options.test_fraction, options.split_order)
    recipe = Recipe(options.text_format, sizes, options.shuffle_seed)
    source = find_source(inputs, options, work.path)
    if source.ignored:
        names = printable(abbreviated(source.ignored))
        print(f"not read, as no text by their names, or links to folders: {names}", file=sys.stderr, flush=True)
    choice = TokenizerChoice(options.tokenizer, options.train_tokenizer)
    fingerprint = choice.check()
    if options.restart:  # only now: what the user typed makes sense
        work.clear()
    begun_with = {"input": abbreviated(inputs), **options.deciding(), "tokenizer_file_sha256": fingerprint}
    preparation = Preparation.begin(work, source, recipe, begun_with)
    name = choice.bring(partial(sample_texts, source, recipe), work.dataset)
    workers = options.workers or usable_cores()
    with EncoderProcesses(_place(name, work), workers) as encoders, ReadingProgress(source.files) as progress:
        try:
            tokenizer = load_tokenizer(_place(name, work))
        except UserError as error:
            hint = "; or give --train-tokenizer 4096, which needs no network" if name == "gpt2" else ""
            raise UserError(f"{error}{hint}") from None
        splits = preparation.run(tokenizer, encoders, progress.show)
    empty = preparation.journal.here.empty
    origin = {**source.origin, **options.deciding(), "tokenizer": name, "empty_documents": empty}
    return Made(splits, name, tokenizer.vocab_size, origin)


def _from_shards(inputs: Sequence[str], work: WorkFolder, options: PreparationOptions) -> Made:
    choice = TokenizerChoice(options.tokenizer, None)
    begun_with = {
        "input": abbreviated(inputs),
        **options.deciding_for_shards(),
        "tokenizer_file_sha256": choice.check(),
    }
    by_split = find_shards(inputs, options.token_dtype)
    shards = list(itertools.chain.from_iterable(by_split.values()))
    check_token_ids(shards, choice.name)
    if options.restart:
        work.clear()
    work.resume_or_begin(begun_with, [[str(shard.path), version_of(shard.path.stat())] for shard in shards])
    name = choice.bring(list, work.dataset)  # no texts: a known one is not trained
    tokenizer = load_tokenizer(_place(name, work))
    splits = [import_shards(split, own, tokenizer, work.dataset) for split, own in sorted(by_split.items())]
    return Made(splits, name, tokenizer.vocab_size, {"shards": [shard.path.name for shard in shards]})
