"""Making a dataset folder, of text or of token shards, as prepare_datasets.py's options ask for."""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from harness.common.errors import RunError, RunStopped, UserError, place_of, printable
from harness.common.files import version_of
from harness.common.libraries import usable_cores
from harness.common.messages import abbreviated
from harness.data.preparation.encode import Encoded, EncoderProcesses
from harness.data.preparation.new_tokenizer import TokenizerChoice, sample_texts
from harness.data.preparation.pipeline import Preparation, Recipe
from harness.data.preparation.sources import find_source, short_name
from harness.data.preparation.splits import About, Recorded, Split, SplitSizes, write_dataset_meta
from harness.data.preparation.stream import StreamSize
from harness.data.preparation.text_input import TextFile, TextFormat
from harness.data.preparation.token_input import check_token_ids, find_shards, import_shards
from harness.data.preparation.work import WorkFolder, check_target
from harness.data.tokenizers.load import load_tokenizer


@dataclass(frozen=True)
class PreparationOptions:
    """The command's options that decide how a dataset is made, by the command's names and with its defaults."""

    text_column: str = "text"
    document_separator: str | None = None  # as it was typed
    replace_invalid: bool = False
    include: tuple[str, ...] = ()
    revision: str | None = None
    delete_after: bool = False
    tokenizer: str | None = None
    train_tokenizer: int | None = None
    validation_fraction: float = 0.01
    test_fraction: float = 0.0
    split_order: Literal["seeded", "given"] = "seeded"
    shuffle_seed: int | None = None
    description: str = ""
    workers: int | None = None
    overwrite: bool = False
    restart: bool = False
    from_bin: bool = False
    token_dtype: str | None = None

    @property
    def text_format(self) -> TextFormat:
        """Format of the documents in the files."""
        separator = self.document_separator
        errors: Literal["strict", "replace"] = "replace" if self.replace_invalid else "strict"
        return TextFormat(self.text_column, separator and _unescaped(separator), errors)

    def deciding(self) -> dict[str, Recorded]:
        """The options that decide the bytes of a dataset made of text, to be recorded: interrupted work resumes with
        the same ones only."""
        return {
            "text_column": self.text_column,
            "document_separator": self.document_separator,
            "replace_invalid": "any" if self.replace_invalid else False,
            "include": list(self.include),
            "tokenizer": self.tokenizer,
            "train_tokenizer": self.train_tokenizer,
            "validation_fraction": self.validation_fraction,
            "test_fraction": self.test_fraction,
            # The given order was the only one once, and had no key.
            **({} if self.split_order == "given" else {"split_order": self.split_order}),
            "shuffle_seed": self.shuffle_seed,
        }

    def deciding_for_shards(self) -> dict[str, Recorded]:
        """The options that decide the bytes of a dataset made of token shards."""
        return {"from_bin": True, "token_dtype": self.token_dtype, "tokenizer": self.tokenizer}


def _unescaped(text: str) -> str:
    r"""Replace \n, \r, \t and \\ by what they stand for, since few shells let one type them."""
    return text.replace("\\\\", "\0").replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t").replace("\0", "\\")


SECONDS_BETWEEN_LINES = 10.0
BAR_FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


class ReadingProgress:
    """Documents, tokens, tokens/s and time left. The bar counts bytes of the input files."""

    def __init__(self, files: Sequence[TextFile]) -> None:
        self._before = [0, *itertools.accumulate(file.size for file in files)]
        self._began = self._shown = time.monotonic()
        self._bar: tqdm | None = None
        self._first: tuple[int, int] | None = None  # bytes and tokens of an earlier process
        self._is_terminal = sys.stderr.isatty()

    def show(self, encoded: Encoded, size: StreamSize) -> None:
        """Tell of a batch; `size` counts all there is so far."""
        position = self._before[encoded.batch.file] + encoded.batch.position
        if self._first is None:
            self._first = (position, size.tokens)
        now = time.monotonic()
        done, tokens = position - self._first[0], size.tokens - self._first[1]
        speed = tokens / max(now - self._began, 1e-9)
        if self._is_terminal:
            if self._bar is None:
                total = self._before[-1]
                self._bar = tqdm(total=total, initial=position, bar_format=BAR_FORMAT, dynamic_ncols=True)
            self._bar.update(position - self._bar.n)
            self._bar.set_postfix_str(
                f"{_short(size.documents)} documents, {_short(size.tokens)} tokens, {_short(speed)} tokens/s"
            )
        elif now - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = now
            left = (now - self._began) * (self._before[-1] - position) / max(1, done)
            print(
                f"{position / max(1, self._before[-1]):4.0%}  {size.documents:,} documents  {size.tokens:,} tokens  "
                f"{speed:,.0f} tokens/s  {tqdm.format_interval(left)} left",
                flush=True,
            )

    def __enter__(self) -> ReadingProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _short(number: float) -> str:
    return tqdm.format_sizeof(number)


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
    source = find_source(
        inputs,
        include=options.include,
        revision=options.revision,
        delete_after=options.delete_after,
        work=work.path,
    )
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
