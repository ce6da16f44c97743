"""The steps from text to a dataset folder that appears whole, through work that can be interrupted at any point."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from harness.common.errors import RunError, UserError
from harness.data.preparation.encode import Encoded, EncoderProcesses, batches, encode_batches, token_dtype
from harness.data.preparation.sources import TextSource, read_source
from harness.data.preparation.splits import Recorded, Split, SplitSizes, assign_splits, hold_out, write_splits
from harness.data.preparation.stream import StreamSize, TokenStream, shuffle
from harness.data.preparation.text_input import TextFormat
from harness.data.preparation.work import Journal, Mark, Phase, WorkFolder
from harness.data.tokenizers.tokenizer import Tokenizer

COMMIT_TOKENS = 2**24  # between two notes of how far the work has come: some seconds

Show = Callable[[Encoded, StreamSize], None]


@dataclass(frozen=True)
class Recipe:
    """The options that, with text and tokenizer, decide a dataset's bytes."""

    form: TextFormat = field(default_factory=TextFormat)
    sizes: SplitSizes = field(default_factory=SplitSizes)
    shuffle_seed: int | None = None


@dataclass
class Preparation:
    """One dataset on its way."""

    work: WorkFolder
    source: TextSource
    recipe: Recipe
    journal: Journal

    @classmethod
    def begin(
        cls, work: WorkFolder, source: TextSource, recipe: Recipe, begun_with: dict[str, Recorded]
    ) -> Preparation:
        """Open the journal, or take up that of interrupted work. `begun_with` is what it records of the command.

        Raises UserError if interrupted work had other options or if what it has read has changed.
        """
        files = [[file.name, file.version] for file in source.files]
        journal = work.resume_or_begin(begun_with, files)
        return cls(work, source, recipe, journal)

    def run(self, tokenizer: Tokenizer, encoders: EncoderProcesses, show: Show) -> list[Split]:
        """Do what is left to do: the splits' files are whole when this returns. `show` hears of each batch.

        Raises UserError and RunError.
        """
        dtype = token_dtype(tokenizer.vocab_size)
        stream = TokenStream(self.work.path / "text.tokens", dtype)
        if self.journal.phase == "reading":
            self._tokenize(stream, encoders, show)
        if not self.journal.here.total.documents:
            raise UserError(f"{self.source.name}: no documents with text ({self.journal.here.empty:,} are empty)")
        if self.journal.phase == "read":
            self._hold_out(stream)
        stream.size = self.journal.here.size
        if self.recipe.shuffle_seed is not None:
            stream = self._shuffled(stream, self.recipe.shuffle_seed)
        if self.journal.phase != "shared out":
            if not self.journal.splits:
                self.journal.splits = [asdict(split) for split in assign_splits(stream, self.recipe.sizes, tokenizer)]
            self._enter("shared out")
        splits = [Split(**split) for split in self.journal.splits]
        write_splits(stream, splits, self.work.dataset)
        return splits

    def _pool(self, dtype: np.dtype) -> TokenStream:
        return TokenStream(self.work.path / "pool.tokens", dtype)

    def _tokenize(self, stream: TokenStream, encoders: EncoderProcesses, show: Show) -> None:
        here, pool = self.journal.here, self._pool(stream.dtype)
        stream.open_at(here.size)
        pool.open_at(here.pool)
        pieces = read_source(self.source, self.recipe.form, here.file, here.documents)
        total, committed, empty = here.total, here.total.tokens, here.empty
        try:
            in_batches = batches(pieces, here.file, here.documents)
            for encoded in encode_batches(in_batches, encoders.encode, encoders.count):
                numbers = np.cumsum(encoded.ends) - encoded.ends  # of the pieces' documents
                in_pool = self.recipe.sizes.in_pool(total.documents, len(numbers))[numbers]
                stream.append(encoded, ~in_pool)
                pool.append(encoded, in_pool)
                total = stream.size + pool.size
                empty += encoded.batch.empty
                if encoded.batch.is_whole:
                    read = (encoded.batch.file, encoded.batch.documents, empty)
                    self.journal.move_to(Mark(*read, stream.size, pool.size))
                    if total.tokens - committed >= COMMIT_TOKENS:
                        stream.flush()
                        pool.flush()
                        self.journal.save(self.work.journal)
                        committed = total.tokens
                show(encoded, total)
            stream.flush()
            pool.flush()
            self._enter("read")
        except (UserError, RunError, KeyboardInterrupt):  # what is done is done
            with suppress(OSError):
                stream.flush()
                pool.flush()
                self.journal.save(self.work.journal)
            raise
        finally:
            stream.close()
            pool.close()

    def _hold_out(self, stream: TokenStream) -> None:
        pool = self._pool(stream.dtype)
        pool.size = self.journal.here.pool
        stream.open_at(self.journal.here.size)
        if self.recipe.sizes.order == "seeded":
            splits = hold_out(pool, stream, self.recipe.sizes, self.work.dataset)
            self.journal.splits = [asdict(split) for split in splits]
        stream.flush()
        stream.close()
        self.journal.here = replace(self.journal.here, size=stream.size, pool=StreamSize())
        self._enter("held out")
        for path in (pool.path, pool.index_path):
            path.unlink(missing_ok=True)  # there is none in work that an earlier version began

    def _shuffled(self, stream: TokenStream, seed: int) -> TokenStream:
        target = TokenStream(self.work.path / "shuffled.tokens", stream.dtype)
        target.size = stream.size
        if self.journal.phase == "held out":
            target.open_at(StreamSize())
            target.close()
            shuffle(stream, target, seed)
            target.size = stream.size
            self._enter("shuffled")
        for path in (stream.path, stream.index_path):
            path.unlink(missing_ok=True)
        return target

    def _enter(self, phase: Phase) -> None:
        self.journal.phase = phase
        self.journal.save(self.work.journal)
