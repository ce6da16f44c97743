"""Judging as the book and the lab notebook do: each answer alone, by their prompts word for word, for an integer.

Such scores compare with theirs, and not with those of models that are judged together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.common.messages import quoted
from harness.evaluation.instruct.responses import Response
from harness.evaluation.judge.prompt import InvalidAnswerError, Prompt

NAME = "answer"  # what the one answer is called in the cache
INTEGER = re.compile(r"\d{1,3}", re.ASCII)
LARGEST = 100


@dataclass(frozen=True)
class Wording:
    """Another work's prompt: `task`, with what the model was asked under `input_heading` if there was an input."""

    owner: str
    task: str
    input_heading: str

    def text(self, answer: Response) -> str:
        given = f"\n\n{self.input_heading}\n{answer.input}" if answer.input else ""
        asked = REQUEST + answer.instruction + given
        return self.task.format(asked=asked, output=answer.output, response=answer.response)


# The texts below are quoted, since only the same words give comparable scores.
#
# Copyright (c) Sebastian Raschka, under Apache License 2.0. Source: Build a Large Language Model (From Scratch),
# chapter 7, `format_input` and `generate_model_scores`; github.com/rasbt/LLMs-from-scratch, ch07/01_main-chapter-code.
REQUEST = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n"
)
BOOK = Wording(
    "the book",
    "Given the input `{asked}` and correct output `{output}`, score the model response `{response}` on a scale from 0 "
    "to 100, where 100 is the best score. Respond with the integer number only.",
    "### Input:",
)
# The same, modifications copyright 2025 Giles Thomas, under Apache License 2.0: "on a scale of", and an input's heading
# without a colon. Source: github.com/gpjt/ddp-base-model-from-scratch, test_ift.py, which made the notebook's scores.
NOTEBOOK = Wording(
    "the notebook",
    "Given the input `{asked}` and correct output `{output}`, score the model response `{response}` on a scale of 0 "
    "to 100, where 100 is the best score. Respond with the integer number only.",
    "### Input",
)
WORDINGS = {"book": BOOK, "notebook": NOTEBOOK}


@dataclass(frozen=True)
class AlonePrompt(Prompt):
    """A prompt about one model's answer."""

    def parse(self, text: str) -> dict[str, float]:
        """The integer that is all of the judge's answer. Raises InvalidAnswerError for anything else."""
        stripped = text.strip()
        if not stripped:
            raise InvalidAnswerError("an empty answer")
        if not INTEGER.fullmatch(stripped) or int(stripped) > LARGEST:
            raise InvalidAnswerError(f"{quoted(stripped)} is not an integer from 0 to {LARGEST}")
        return {NAME: float(stripped)}


def alone_prompt(wording: str, answer: Response, model: int) -> AlonePrompt:
    """Ask about the answer of one model, by its index, in the words of WORDINGS[wording]."""
    return AlonePrompt(WORDINGS[wording].text(answer), (NAME,), (model,), wording)
