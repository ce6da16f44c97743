"""Instruction data in Alpaca's form, and responses files. Each responses file has the answers of one fine-tuned
model."""

from __future__ import annotations

import hashlib
import http.client
import json
import urllib.request
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from harness.common.errors import UserError, explained
from harness.common.files import atomic_file, replace_text, user_cache
from harness.common.json_files import RecordedCount, parse_config, read_json
from harness.common.messages import as_unicode

# Shares as in Raschka's book, Build a Large Language Model (From Scratch), chapter 7. The file's first entries are for
# training, the next for testing, and the rest for validation.
TRAIN_PART, TEST_PART = 0.85, 0.1
FEWEST_ENTRIES = 20  # twice as many as are needed for one entry in each of the three parts
DOWNLOAD_TIMEOUT_SECONDS = 30.0
NOTEBOOK_SUFFIX = "-ift-test-results"
# A text of any length. Because of min_length, pydantic also refuses texts with half of a surrogate pair, which cannot
# be written to a file.
Text = Annotated[str, Field(min_length=0)]


class _Part(BaseModel):
    """Base class for the parts of an instruction file or a responses file. Unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)


class Instruction(_Part):
    """One entry of an instruction file. `input` is "" if the instruction needs none."""

    instruction: Text
    input: Text
    output: Text

    def request(self, input_heading: str = "### Input:") -> str:
        """Return the instruction in the prompt format of Raschka's book: Stanford Alpaca's (Taori et al. 2023), but
        with the same first paragraph for entries with and without an input."""
        request = (
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            f"\n\n### Instruction:\n{self.instruction}"
        )
        return request + (f"\n\n{input_heading}\n{self.input}" if self.input else "")

    @property
    def prompt(self) -> str:
        """Text that the model continues with its answer."""
        return f"{self.request()}\n\n### Response:\n"

    @property
    def question(self) -> tuple[str, str, str]:
        """Instruction, input and reference answer. Two questions are the same if these are equal."""
        return self.instruction, self.input, self.output


class InstructionSplits(NamedTuple):
    """The three parts of an instruction file."""

    train: list[Instruction]
    validation: list[Instruction]
    test: list[Instruction]

    @classmethod
    def load(cls, path: Path) -> InstructionSplits:
        """Read an instruction file, a JSON list of objects with instruction, input and output, and split it. Raises
        UserError if the file is not valid or has too few entries."""
        wanted = 'a list of objects with instruction, input ("" where there is none) and output'
        values, entries = read_json(path), []
        if not isinstance(values, list):
            raise UserError(f"{path}: must be {wanted}")
        for number, value in enumerate(values, start=1):
            place = f"{path}: entry {number}"
            with explained(after=f"; the file must be {wanted}"):
                entries.append(parse_config(Instruction, value, Path(place)))
            if not entries[-1].instruction.strip():
                raise UserError(f'{place}: key "instruction": empty; write one, or remove the entry')
        if len(entries) < FEWEST_ENTRIES:
            raise UserError(
                f"{path}: only {len(entries)} entries; training, validation and test together need {FEWEST_ENTRIES}"
            )
        train, test = int(len(entries) * TRAIN_PART), int(len(entries) * TEST_PART)
        return cls(entries[:train], entries[train + test :], entries[train : train + test])


def local_instructions(file_or_url: str) -> Path:
    """Return the path of an instruction file. An http(s) URL is downloaded once, into this user's cache. Raises
    UserError if the download fails, or does not give an instruction file. A local path is not checked."""
    if not file_or_url.lower().startswith(("http://", "https://")):
        return Path(file_or_url)
    try:
        folder = user_cache()
    except RuntimeError:  # this user has no home directory
        raise UserError(
            f"{file_or_url}: no cache for it; set HOME or XDG_CACHE_HOME, or give a file by --data"
        ) from None
    name = PurePosixPath(file_or_url.partition("?")[0]).name
    try:
        path = folder / f"{hashlib.sha256(file_or_url.encode()).hexdigest()[:16]}-{name}"
        if path.is_file():
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as draft:
            with urllib.request.urlopen(file_or_url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as answer:
                draft.write_bytes(answer.read())  # raises IncompleteRead if the connection breaks
            try:  # a login page, for example, must not stay in the cache
                InstructionSplits.load(draft)
            except UserError as error:
                raise UserError(str(error).replace(str(draft), file_or_url)) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise UserError(f"{file_or_url}: cannot be downloaded to {folder}: {reason}; give a file by --data") from None
    return path


class Response(Instruction):
    """One question (`instruction` and `input`), its reference answer (`output`), and the model's answer
    (`response`)."""

    response: Text


class InstructionData(_Part):
    """The instruction file that the questions come from. `entries` is the number of entries in all parts together."""

    file: Text
    sha256: str
    entries: RecordedCount
    test_entries: RecordedCount


class AnsweringModel(_Part):
    """The checkpoint that was fine-tuned and then answered the questions."""

    checkpoint: Text  # the name of its folder
    sha256: str  # of its model.safetensors, before fine-tuning
    device: Text
    torch: Text


class Responses(_Part):
    """Contents of a responses file. `model` is the model's name in tables."""

    model: str = Field(min_length=1)
    weights: AnsweringModel | None = None  # None if not from a run, or in files of earlier versions
    data: InstructionData | None = None
    fine_tuning: dict[str, Any] = {}
    responses: list[Response] = Field(min_length=1)

    @property
    def questions_sha256(self) -> str:
        """SHA-256 (hexadecimal) of the questions and reference answers, in order. Models with equal hashes can be
        compared."""
        questions = [response.question for response in self.responses]
        return hashlib.sha256(json.dumps(questions).encode()).hexdigest()

    @property
    def answers_sha256(self) -> str:
        """SHA-256 (hexadecimal) of all that a judge sees: questions, reference answers and the model's answers."""
        answers = [(*response.question, response.response) for response in self.responses]
        return hashlib.sha256(json.dumps(answers).encode()).hexdigest()


def read_responses(path: Path) -> Responses:
    """Read a responses file. The files of Raschka's book (chapter 7) and Giles Thomas's lab notebook are mere lists of
    answers: their models are named after the files. Raises UserError if the file is not valid."""
    value = read_json(path)
    if isinstance(value, list):
        answers = [
            {**each, "response": each["model_response"]}
            if isinstance(each, dict) and "model_response" in each
            else each
            for each in value
        ]
        value = {"model": as_unicode(path.stem).removesuffix(NOTEBOOK_SUFFIX), "responses": answers}
    if not isinstance(value, dict):
        raise UserError(f'{path}: must hold a list of answers, or one JSON object with "model" and "responses"')
    return parse_config(Responses, value, path)


def write_responses(path: Path, responses: Responses) -> None:
    """Write a responses file. Raises OSError if it cannot be written."""
    replace_text(path, json.dumps(responses.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n")


def read_comparable(paths: Sequence[Path]) -> list[Responses]:
    """Read one or more responses files of models that are to be compared. Models of equal names are told apart by the
    paths of their files. Raises UserError if a file is not valid or is given twice, or if questions or reference
    answers differ."""
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
                "one dataset"
            )
    names = Counter(model.model for model in models)
    told_apart = [
        model if names[model.model] == 1 else model.model_copy(update={"model": f"{model.model} ({path})"})
        for path, model in zip(paths, models, strict=True)
    ]
    if (most := Counter(model.model for model in told_apart).most_common(1)[0])[1] > 1:
        path = paths[[model.model for model in told_apart].index(most[0])]
        raise UserError(f'{path}: key "model": another file\'s model is called {most[0]}, too; rename one')
    return told_apart
