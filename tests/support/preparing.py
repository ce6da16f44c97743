"""Runs of prepare_datasets.py, and functions with which its tests read the datasets."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load_file

from harness.data.tokenizers import Tokenizer, load_tokenizer, train_bpe
from tests.support.fake_hub import hub_here
from tests.support.in_process import call
from tests.support.isolation import ROOT, on_path
from tests.support.launch import PATIENCE_SECONDS, Result, finish
from tests.support.warm import WarmProcess, warm_server

SMALL = ["--train-tokenizer", "300"]  # trains a vocabulary that needs no network
IN_ORDER = ["--split-order", "given"]  # the last documents are for validation, the others for train

WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "42", "naïve", "日本", "engineers"),
    *("don't\tcount\r\n", "", "snow", "🐍", "flakes"),
]


PREPARE = str(ROOT / "prepare_datasets.py")
# A forked process has the sys.path of its parent, so that PYTHONPATH must be added to it.
TAKE_PATH = "import os, sys; sys.path += os.environ['PYTHONPATH'].split(os.pathsep)\n"


@dataclass
class Preparer:
    """Folder with the inputs and datasets of one test."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """Start the real command in this folder, in a Python process that starts cold."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, PREPARE, *map(str, arguments)]
        return subprocess.Popen(command, cwd=self.path, env={**os.environ, **self.environment}, **pipes | options)

    def fork(self, *arguments: object, prelude: str = "") -> WarmProcess:
        """Start the real command in a fork, without the delay of a cold start. The Python source `prelude` runs before
        the command."""
        environment = {**os.environ, **self.environment}
        return warm_server().spawn([PREPARE, *map(str, arguments)], self.path, environment, TAKE_PATH + prelude)

    def result(self, *arguments: object, prelude: str = "") -> Result:
        """Run the command to its end, and return its result, whatever its exit status. It runs in the test process
        unless it needs processes or modules of its own."""
        if prelude or "PYTHONPATH" in self.environment or "--workers" in arguments:
            return finish([self.fork(*arguments, prelude=prelude)], expect=None, timeout=PATIENCE_SECONDS)
        with ExitStack() as stack:
            if "HF_ENDPOINT" in self.environment:
                stack.enter_context(hub_here(self.environment))
            return call("prepare_datasets.py", *arguments, folder=self.path, environment=self.environment)

    def run(self, *arguments: object, status: int = 0, prelude: str = "") -> str:
        """Run the command to its end and check its exit status. Return its output, or its error line if the status is
        not 0."""
        done = self.result(*arguments, prelude=prelude)
        assert done.status == status, done
        if status:
            assert "Traceback" not in done.stderr
            [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            return line
        return done.stdout

    def prepare(self, source: object, name: str, *options: object, prelude: str = "") -> Path:
        """Make the dataset datasets/me/<name> and return its folder. It has a small trained vocabulary unless the
        options choose another tokenizer."""
        target = self.path / "datasets" / "me" / name
        chosen = any(str(option).startswith("--t") and "tokenizer" in str(option) for option in options)
        self.run(source, target, *options, *([] if chosen else SMALL), prelude=prelude)
        return target


def texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Return documents, all different, of words with spaces, line ends and characters of one to four bytes."""
    random, words = np.random.default_rng(seed), np.array(WORDS)  # `choice` would convert a list at each call
    return [f"{number} " + " ".join(random.choice(words, random.integers(1, longest))) for number in range(count)]


WORDY = texts(3000)
# In a document, the special token's name is ordinary text.
DOCUMENTS = [*WORDY[:1500], "a <|endoftext|> b", "<|endoftext|>", *WORDY[1502:]]


def with_texts(folder: Path) -> Preparer:
    """Return a Preparer with the file of a small tokenizer and eight files of documents, each with one empty
    document."""
    for number in range(8):
        write_json_lines(folder / "texts" / f"{number}.jsonl", [*DOCUMENTS[number * 375 : (number + 1) * 375], ""])
    train_bpe(iter(WORDY), 300, folder / "tokenizer.json")
    return Preparer(folder)


def write_json_lines(path: Path, documents: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))


def parquet(documents: Sequence[str | None]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": list(range(len(documents))), "text": documents}), buffer, row_group_size=7)
    return buffer.getvalue()


def splits_of(folder: Path) -> dict[str, np.ndarray]:
    return {path.stem: load_file(path)["tokens"] for path in sorted(folder.glob("*.safetensors"))}


def tokenizer_of(folder: Path) -> Tokenizer:
    name = json.loads((folder / "meta.json").read_text())["tokenizer"]
    return load_tokenizer(name if name == "gpt2" else folder / name)


def documents_of(folder: Path, split: str) -> list[str]:
    """Return the decoded documents of a split. The split must end with the end of a document."""
    tokenizer, tokens = tokenizer_of(folder), splits_of(folder)[split]
    ends = np.flatnonzero(tokens == tokenizer.eot_token)
    assert len(ends)
    assert ends[-1] == len(tokens) - 1
    starts = [0, *(ends[:-1] + 1)]
    return [tokenizer.decode(tokens[start:end].tolist()) for start, end in zip(starts, ends, strict=True)]


def held_documents(folder: Path) -> list[str]:
    """Return the documents of train, followed by those of validation."""
    return documents_of(folder, "train") + documents_of(folder, "validation")


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


PLUGIN = """
import tiktoken
RANKS = {{bytes([value]): value for value in range(256)}}
for text in {words!r}:
    for end in range(2, len(text) + 1):
        RANKS.setdefault(text[:end], len(RANKS))
def small():
    return {{
        "name": "small", "pat_str": {pattern!r}, "mergeable_ranks": RANKS,
        "special_tokens": {{"<|endoftext|>": {eot}}},
    }}
ENCODING_CONSTRUCTORS = {{"small": small}}
"""


def plugin(folder: Path, words: list[str], eot: int = 400, pattern: str = r" ?\w+|\W") -> dict[str, str]:
    """Write a plugin that gives tiktoken one more encoding, "small", which knows these words and splits text by
    `pattern`. Return the environment in which tiktoken finds it."""
    path = folder / "plugins" / "tiktoken_ext" / "small.py"
    path.parent.mkdir(parents=True)
    path.write_text(PLUGIN.format(words=[word.encode() for word in words], eot=eot, pattern=pattern))
    return on_path(folder / "plugins")
