"""Instructions as tokens: which of them are learnt, and how they lie in a batch.

Shapes: B entries, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.data.tokenizers.tokenizer import Tokenizer
from harness.evaluation.instruct.instructions import Instruction

IGNORED = -100  # a target that counts for nothing: what torch's cross-entropy has for it


@dataclass(frozen=True)
class Example:
    """An entry's tokens with the end-of-text after its answer, cut so that their targets fit the context."""

    tokens: list[int]
    answer_start: int  # of the first token of the answer; beyond the end, where the cut left nothing of it

    @property
    def has_answer(self) -> bool:
        return self.answer_start < len(self.tokens)


def encode(entry: Instruction, tokenizer: Tokenizer, context_length: int) -> Example:
    """Prompt and answer are encoded apart, as they are when the model is asked: the answer begins at a token's border.

    `context_length` inputs have as many targets, so that one token more fits.
    """
    prompt = tokenizer.encode(entry.prompt)
    tokens = [*prompt, *tokenizer.encode(entry.output), tokenizer.eot_token]
    return Example(tokens[: context_length + 1], len(prompt))


@dataclass(frozen=True)
class Batch:
    """Inputs and targets (BxT); targets that are padding, or not to be learnt, are IGNORED."""

    inputs: Tensor
    targets: Tensor

    def learnt(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, the places (BxT, true: learnt) and the targets there (N), on a device."""
        learnt_BxT = self.targets != IGNORED
        return self.inputs.to(device), learnt_BxT.to(device), self.targets[learnt_BxT].to(device)


def collate(examples: Sequence[Example], padding: int, *, answers_only: bool) -> Batch:
    """Rows padded on the right to the longest, the padding ignored; so are prompts, with `answers_only`.

    The end-of-text after an answer is learnt, though it may be the token that pads. A row without anything to learn
    would stay ignored altogether: `loss` of a batch is a mean over tokens, not over rows.
    """
    width = max(len(example.tokens) for example in examples) - 1
    inputs, targets = [], []
    for example in examples:
        row = example.tokens
        room = width - (len(row) - 1)
        learnt = list(row[1:])
        if answers_only:
            hidden = min(example.answer_start - 1, len(learnt))  # the last token of the prompt predicts the answer
            learnt[:hidden] = [IGNORED] * hidden
        inputs.append([*row[:-1], *[padding] * room])
        targets.append([*learnt, *[IGNORED] * room])
    return Batch(torch.tensor(inputs).view(-1, width), torch.tensor(targets).view(-1, width))


def batches(
    examples: Sequence[Example], size: int, padding: int, *, answers_only: bool, generator: torch.Generator | None
) -> Iterator[Batch]:
    """All examples in batches of up to `size`, shuffled if there is a generator. Batches in which nothing is to be
    learnt are left out: their mean loss would be 0 / 0."""
    count = len(examples)
    order = range(count) if generator is None else torch.randperm(count, generator=generator).tolist()
    shuffled = [examples[index] for index in order]
    for start in range(0, count, size):
        batch = collate(shuffled[start : start + size], padding, answers_only=answers_only)
        if (batch.targets != IGNORED).any():
            yield batch
