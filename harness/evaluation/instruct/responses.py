"""Instruction data, in Alpaca's form, and the answers of fine-tuned models to its questions: a file for each model."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from harness.common.errors import UserError
from harness.common.files import replace_text
from harness.common.json_files import RecordedCount, parse_config, read_json
from harness.common.messages import as_unicode, is_unicode, quoted

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
        return sum(map(len, (self.train, self.validation, self.test)))


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


NOTEBOOK_SUFFIX = "-ift-test-results"
REQUIRED = ("model", "responses")
# With a length to check, pydantic also notices half of a surrogate pair, which no file can take.
Text = Annotated[str, Field(min_length=0)]


class Response(BaseModel):
    """A question of the data set, the answer that it calls right, and the model's own."""

    model_config = ConfigDict(frozen=True, strict=True)

    instruction: Text
    input: Text  # "" where the instruction needs none
    output: Text
    response: Text

    @property
    def question(self) -> tuple[str, str, str]:
        return self.instruction, self.input, self.output


class InstructionData(BaseModel):
    """Source of the questions."""

    model_config = ConfigDict(frozen=True, strict=True)

    file: Text
    sha256: str
    entries: RecordedCount
    test_entries: RecordedCount


class AnsweringModel(BaseModel):
    """The checkpoint of a run whose fine-tuned weights answered, and what they did it on."""

    model_config = ConfigDict(frozen=True, strict=True)

    checkpoint: Text  # the name of its folder
    sha256: str  # of its model.safetensors, before fine-tuning
    device: Text
    torch: Text


class Responses(BaseModel):
    """A responses file. `model` is what tables call the model."""

    model_config = ConfigDict(frozen=True, strict=True)

    model: str = Field(min_length=1)
    weights: AnsweringModel | None = None  # None: of no run, or not told, as earlier versions did not
    data: InstructionData | None = None
    fine_tuning: dict[str, Any] = {}
    responses: list[Response] = Field(min_length=1)

    @property
    def questions_sha256(self) -> str:
        """Hex digest of the questions and right answers in their order: equal where models can be compared."""
        questions = [response.question for response in self.responses]
        return hashlib.sha256(json.dumps(questions).encode()).hexdigest()

    @property
    def answers_sha256(self) -> str:
        """Hex digest of all that a judge sees of this model: questions, right answers, and its own."""
        answers = [(*response.question, response.response) for response in self.responses]
        return hashlib.sha256(json.dumps(answers).encode()).hexdigest()


def read_responses(path: Path) -> Responses:
    """Read a responses file, or a list as the book's chapter 7 and the lab notebook write it: the model is then called
    what the file is.

    Raises UserError naming the key that cannot be a responses file's.
    """
    value = read_json(path)
    if isinstance(value, list):
        name = as_unicode(path.stem).removesuffix(NOTEBOOK_SUFFIX)
        value = {"model": name, "responses": [_from_list(each) for each in value]}
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold one JSON object with {', '.join(REQUIRED)}, or a list of answers")
    return parse_config(Responses, value, path)


def _from_list(entry: Any) -> Any:
    if isinstance(entry, dict) and "model_response" in entry:
        return {**entry, "response": entry["model_response"]}
    return entry


def write_responses(path: Path, responses: Responses) -> None:
    """Whole, in one rename."""
    replace_text(path, json.dumps(responses.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n")


def read_comparable(paths: Sequence[Path]) -> list[Responses]:
    """The files of models that answered the same questions. Models of the same name get their path beside it.

    Raises UserError if a file is given twice, or if two have other questions than one another.
    """
    again = [path for path, count in Counter(path.resolve() for path in paths).items() if count > 1]
    if again:
        raise UserError(f"{again[0]}: given twice; give each model's responses once")
    models = [read_responses(path) for path in paths]
    for path, model in zip(paths[1:], models[1:], strict=True):
        pairs = zip_longest(
            [each.question for each in models[0].responses], [each.question for each in model.responses]
        )
        if different := [number for number, (one, other) in enumerate(pairs, start=1) if one != other]:
            raise UserError(
                f"{paths[0]} and {path}: not the same questions: number {different[0]:,} differs; compare models on "
                "one data set"
            )
    names = Counter(model.model for model in models)
    told_apart = [
        model if names[model.model] == 1 else model.model_copy(update={"model": f"{model.model} ({path})"})
        for path, model in zip(paths, models, strict=True)
    ]
    names = Counter(model.model for model in told_apart)
    for path, model in zip(paths, told_apart, strict=True):
        if names[model.model] > 1:
            raise UserError(f'{path}: key "model": another file\'s model is called {model.model}, too; rename one')
    return told_apart
