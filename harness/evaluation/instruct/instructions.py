"""Instruction data: what a model is asked, and what it should answer, in Alpaca's form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.common.errors import UserError
from harness.common.json_files import read_json
from harness.common.messages import is_unicode, quoted

# The data of the book that this lineage of models follows: Raschka, Build a Large Language Model (From Scratch), ch. 7.
BOOK_DATA = (
    "https://raw.githubusercontent.com/rasbt/LLMs-from-scratch/main/ch07/01_main-chapter-code/instruction-data.json"
)
FIELDS = ("instruction", "input", "output")
# The book's split, in the file's order: training, then test, and the rest for validation.
TRAIN_PART, TEST_PART = 0.85, 0.1
FEWEST_ENTRIES = 20  # below it, a part would be empty


@dataclass(frozen=True)
class Instruction:
    """One entry; `input` is "" where the instruction needs none."""

    instruction: str
    input: str
    output: str

    @property
    def prompt(self) -> str:
        """Everything before the answer, as Taori et al. 2023 (Stanford Alpaca) word it."""
        request = (
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            f"\n\n### Instruction:\n{self.instruction}"
        )
        given = f"\n\n### Input:\n{self.input}" if self.input else ""
        return f"{request}{given}\n\n### Response:\n"


@dataclass(frozen=True)
class InstructionSplits:
    """The three parts of an instruction file."""

    train: list[Instruction]
    validation: list[Instruction]
    test: list[Instruction]

    @classmethod
    def load(cls, path: Path) -> InstructionSplits:
        """Raises UserError naming the file and the number of the entry (from 1) that is not one."""
        entries = load_instructions(path)
        if len(entries) < FEWEST_ENTRIES:
            raise UserError(f"{path}: {len(entries)} entries; to train, validate and test takes {FEWEST_ENTRIES}")
        train, test = int(len(entries) * TRAIN_PART), int(len(entries) * TEST_PART)
        return cls(entries[:train], entries[train + test :], entries[train : train + test])

    @property
    def entries(self) -> int:
        return len(self.train) + len(self.validation) + len(self.test)


def load_instructions(path: Path) -> list[Instruction]:
    """All entries of a file: a JSON list of objects with instruction, input and output.

    Raises UserError naming the file and the number of the entry (from 1) that is not one.
    """
    values = read_json(path)
    if not isinstance(values, list):
        raise UserError(f"{path}: must be a JSON list of objects with {', '.join(FIELDS)}")
    return [_entry(value, f"{path}: entry {number}") for number, value in enumerate(values, start=1)]


def _entry(value: Any, place: str) -> Instruction:
    if not isinstance(value, dict):
        raise UserError(f"{place}: {quoted(value)} is not an object with {', '.join(FIELDS)}")
    for field in FIELDS:
        if field not in value:
            hint = ' ("" where there is none)' if field == "input" else ""
            raise UserError(f"{place}: key {json.dumps(field)}: missing{hint}")
        if not isinstance(value[field], str) or not is_unicode(value[field]):
            raise UserError(f"{place}: key {json.dumps(field)}: {quoted(value[field])} is not text")
    if not value["instruction"].strip():
        raise UserError(f'{place}: key "instruction": empty')
    return Instruction(*(value[field] for field in FIELDS))
