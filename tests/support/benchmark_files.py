"""Small benchmarks made for the tests: task files and their documents, and text to train a tokenizer on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

# The next word follows almost always from the one before it, so that a small model learns to predict it within seconds.
NOUNS = ["river", "mountain", "engine", "garden", "window", "letter", "soldier", "market", "winter", "harbour"]
VERBS = ["carries", "follows", "remembers", "crosses", "paints", "repairs", "forgets", "watches", "answers", "counts"]


def sentence(draw: random.Random, words: int) -> str:
    """Return `words` words such as "the river carries the mountain follows …". About every tenth noun is random instead
    of the next one in NOUNS."""
    place, text = draw.randrange(10), []
    for index in range(words):
        text.append(("the", NOUNS[place], VERBS[place])[index % 3])
        if index % 3 == 2:
            place = draw.randrange(10) if draw.random() < 0.1 else (place + 1) % 10
    return " ".join(text)


def multiple_choice(draw: random.Random, count: int) -> list[dict[str, Any]]:
    """Return questions of many lengths, some longer than the model's context, each with four answers of unequal
    lengths."""
    return [
        {
            "question": sentence(draw, draw.choice([2, 8, 20, 60])),
            "choices": [sentence(draw, draw.randint(1, 4)) for _ in range(4)],
            "label": draw.randrange(4),
        }
        for _ in range(count)
    ]


def texts(draw: random.Random, count: int) -> list[dict[str, Any]]:
    """Return texts that end with "the", each with the two words that should follow."""
    found = []
    for _ in range(count):
        words = sentence(draw, 3 * draw.choice([1, 3, 13, 40])).split()
        found.append({"text": " ".join(words[:-2]), "answer": " ".join(words[-2:])})
    return found


def metrics(aggregation: str, *names: str, higher_is_better: bool = True) -> list[dict[str, Any]]:
    """Return the metrics of a task file, all of one aggregation."""
    return [{"metric": name, "aggregation": aggregation, "higher_is_better": higher_is_better} for name in names]


# For each kind of task, the function that makes its documents, and the settings of its task file.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "choice": (
        multiple_choice,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "label",
            "metric_list": metrics("mean", "acc", "acc_norm"),
        },
    ),
    "last_word": (
        texts,
        {
            "output_type": "loglikelihood",
            "doc_to_text": "{{text}} {{answer.split(' ')[0]}}",
            "doc_to_target": " {{answer.split(' ')[1]}}",
            "metric_list": metrics("perplexity", "perplexity", higher_is_better=False) + metrics("mean", "acc"),
        },
    ),
    "rolling": (
        texts,
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [
                *metrics("weighted_perplexity", "word_perplexity", "byte_perplexity", higher_is_better=False),
                *metrics("bits_per_byte", "bits_per_byte", higher_is_better=False),
            ],
        },
    ),
    "generate": (
        texts,
        {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": " {{answer}}",
            "generation_kwargs": {"until": ["\n", " the"], "max_gen_toks": 12, "do_sample": False},
            "metric_list": metrics("mean", "exact_match"),
        },
    ),
}


def write_task(folder: Path, kind: str, *, count: int = 24, name: str = "", **changes: Any) -> Path:
    """Write a task file (JSON is valid YAML) and, beside it, a file with `count` documents. Return the path of the task
    file."""
    name = name or kind
    make, settings = KINDS[kind]
    draw = random.Random(name)
    files = {"test": folder / f"{name}.jsonl", "train": folder / f"{name}-train.jsonl"}
    for path, size in zip(files.values(), (count, 8), strict=True):
        path.write_text("".join(json.dumps(doc) + "\n" for doc in make(draw, size)))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: str(path) for split, path in files.items()}},
        "test_split": "test",
        "training_split": "train",
        "metadata": {"version": 1.0},
        **settings,
        **changes,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(task, indent=2))
    return path
