"""Steps that turn text into the files of a dataset's splits. They can be interrupted at any point and resumed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from harness.common.errors import RunError, UserError
from harness.data.preparation.encode import Encoded, Encoder, batches, encode_batches, token_dtype
from harness.data.preparation.splits import Split, SplitSizes, assign_splits, hold_out, write_splits
from harness.data.preparation.stream import StreamSize, TokenStream, shuffle
from harness.data.preparation.text_input import TextFormat, TextSource
from harness.data.preparation.work import Journal, Mark, Phase, WorkFolder
from harness.data.tokenizers.tokenizer import Tokenizer

COMMIT_TOKENS = 2**24  # between two saves of the journal; they take some seconds to encode

Show = Callable[[Encoded, StreamSize], None]


@dataclass(frozen=True)
class Recipe:
    """Options that determine a dataset's bytes, together with the text and the tokenizer."""

    form: TextFormat = field(default_factory=TextFormat)
    sizes: SplitSizes = field(default_factory=SplitSizes)
    shuffle_seed: int | None = None


@dataclass
class Preparation:
    """Preparation of one dataset from text, new or resumed."""

    work: WorkFolder
    source: TextSource
    recipe: Recipe
    journal: Journal

    def run(self, tokenizer: Tokenizer, encoder: Encoder, workers: int, show: Show) -> list[Split]:
        """Do all steps that remain, and return the splits, whose files are then complete. `show` is called after each
        batch.

        Raises UserError if the text is wrong or too short for the splits, RunError if reading or encoding it fails.
        """
        dtype = token_dtype(tokenizer.vocab_size)
        stream, pool = (TokenStream(self.work.path / f"{name}.tokens", dtype) for name in ("text", "pool"))
        if self.journal.phase == "reading":
            self._tokenize(stream, pool, encoder, workers, show)
        if not self.journal.here.total.documents:
            raise UserError(f"{self.source.name}: no documents with text ({self.journal.here.empty:,} are empty)")
        if self.journal.phase == "read":
            self._hold_out(stream, pool)
        stream.size = self.journal.here.size
        if self.recipe.shuffle_seed is not None:
            stream = self._shuffled(stream, self.recipe.shuffle_seed)
        if self.journal.phase != "shared out":
            if not self.journal.splits:
                self.journal.splits = assign_splits(stream, self.recipe.sizes, tokenizer)
            self._enter("shared out")
        write_splits(stream, self.journal.splits, self.work.dataset)
        return self.journal.splits

    def _tokenize(self, stream: TokenStream, pool: TokenStream, encoder: Encoder, workers: int, show: Show) -> None:
        here = self.journal.here
        stream.open_at(here.size)
        pool.open_at(here.pool)

        def save() -> None:
            stream.flush()
            pool.flush()
            self.journal.save(self.work.journal)

        pieces = self.source.read(self.recipe.form, here.file, here.documents)
        total, committed, empty = here.total, here.total.tokens, here.empty
        try:
            in_batches = batches(pieces, here.file, here.documents)
            for encoded in encode_batches(in_batches, encoder, workers):
                numbers = np.cumsum(encoded.ends) - encoded.ends  # document number of each piece within the batch
                in_pool = self.recipe.sizes.in_pool(total.documents, len(numbers))[numbers]
                stream.append(encoded, ~in_pool)
                pool.append(encoded, in_pool)
                total = stream.size + pool.size
                empty += encoded.batch.empty
                if encoded.batch.is_whole:
                    batch = encoded.batch
                    here = self.journal.here = Mark(batch.file, batch.documents, empty, stream.size, pool.size)
                    if not batch.documents:
                        self.journal.file_start = here
                    if total.tokens - committed >= COMMIT_TOKENS:
                        save()
                        committed = total.tokens
                show(encoded, total)
            self.journal.phase = "read"
            save()
        except (UserError, RunError, KeyboardInterrupt):  # keep the work that is done
            with suppress(OSError):
                save()
            raise
        finally:
            stream.close()
            pool.close()

    def _hold_out(self, stream: TokenStream, pool: TokenStream) -> None:
        pool.size = self.journal.here.pool
        stream.open_at(self.journal.here.size)
        if self.recipe.sizes.order == "seeded":
            self.journal.splits = hold_out(pool, stream, self.recipe.sizes, self.work.dataset)
        stream.flush()
        stream.close()
        self.journal.here = replace(self.journal.here, size=stream.size, pool=StreamSize())
        self._enter("held out")
        pool.delete()  # `delete` accepts missing files: work that an earlier version began has no pool

    def _shuffled(self, stream: TokenStream, seed: int) -> TokenStream:
        target = TokenStream(self.work.path / "shuffled.tokens", stream.dtype)
        if self.journal.phase == "held out":
            shuffle(stream, target, seed)
            self._enter("shuffled")
        target.size = stream.size
        stream.delete()
        return target

    def _enter(self, phase: Phase) -> None:
        self.journal.phase = phase
        self.journal.save(self.work.journal)
