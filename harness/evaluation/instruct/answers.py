"""Answers of a fine-tuned model to instructions."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from harness.data.tokenizers.tokenizer import Tokenizer
from harness.evaluation.generation import GREEDY, continue_batch, until, without_end
from harness.evaluation.instruct.instructions import Instruction
from harness.evaluation.instruct.responses import Response
from harness.model.inference import LanguageModel

ROWS = 16


def answer(model: LanguageModel, tokenizer: Tokenizer, entries: Sequence[Instruction], longest: int) -> list[Response]:
    """The likeliest answer to each entry, in their order, of at most `longest` tokens: the same every time.

    Of a prompt beyond the context length the model sees the end.
    """
    prompts = [tokenizer.encode(entry.prompt) for entry in entries]
    by_length = sorted(range(len(entries)), key=lambda index: len(prompts[index]))  # little padding in a batch
    texts = [""] * len(entries)
    with tqdm(total=len(entries), unit="answer", leave=False, disable=not sys.stderr.isatty()) as bar:
        for start in range(0, len(entries), ROWS):
            rows = by_length[start : start + ROWS]
            new = continue_batch(
                model,
                [prompts[index] for index in rows],
                GREEDY,
                is_done=until(longest, tokenizer),
                vocab_size=tokenizer.vocab_size,
            )
            for index, tokens in zip(rows, new, strict=True):
                texts[index] = tokenizer.decode(without_end(tokens, tokenizer)).strip()
            bar.update(len(rows))
    return [
        Response(instruction=entry.instruction, input=entry.input, output=entry.output, response=text)
        for entry, text in zip(entries, texts, strict=True)
    ]
