"""A dataset folder on the Hugging Face Hub, with a card that says what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.common.hub import CARD, HubWork, upload
from harness.data.dataset import Dataset
from harness.data.preparation.splits import SPLITS
from harness.data.preparation.work import is_dataset_file


def upload_dataset(dataset: Dataset, name: str, *, public: bool) -> str:
    """Upload the folder's files as one commit to the dataset repository `name`, made if it is not there; its address.

    A repository that is there keeps being private or public. What the Hub has already is not sent again. Raises
    UserError.
    """
    again = f"prepare_datasets.py --verify {dataset.folder} --push-to-hub {name} sends what is missing"
    work = HubWork(
        name, "dataset", dataset.folder, "--push-to-hub", "upload the folder by hand", again, verb="write to"
    )
    files: dict[str, Path | bytes] = {path.name: path for path in _files(dataset)}
    files[CARD] = card(dataset, name).encode()
    message = f"{dataset.name}: {', '.join(split for split in SPLITS if dataset.has_split(split))}"
    # Of an earlier dataset in the repository: a test split that is now trained on, or another tokenizer.
    return upload(work, files, message, public=public, is_replaced=is_dataset_file)


def _files(dataset: Dataset) -> list[Path]:
    """The files of the dataset; all others in the folder are the user's own."""
    names = ["meta.json", *(f"{split}.safetensors" for split in SPLITS if dataset.has_split(split))]
    if isinstance(dataset.tokenizer, Path):
        names.append(dataset.tokenizer.name)
    return [dataset.folder / name for name in names if (dataset.folder / name).exists()]


def card(dataset: Dataset, name: str) -> str:
    """The repository's README.md: front matter that the Hub reads, and what a person wants to know.

    Format: https://huggingface.co/docs/hub/datasets-cards
    """
    meta = dataset.meta
    rows = [
        f"| {split} | {_shown(said, 'documents')} | {len(dataset.split(split)):,} | {_shown(said, 'bytes')} |"
        for split in SPLITS
        if dataset.has_split(split)
        for said in [meta.splits.get(split)]
    ]
    tokenizer = "GPT-2's (tiktoken)" if meta.tokenizer == "gpt2" else f"`{meta.tokenizer}`, in this repository"
    source = json.dumps(meta.model_extra.get("source", {}), indent=2) if meta.model_extra else "{}"
    return "\n".join(
        [
            "---",
            f"pretty_name: {json.dumps(dataset.name)}",
            "tags:",
            "- tokens",
            "- ddp-pretrain",
            "---",
            "",
            f"# {dataset.name}",
            "",
            meta.description or "Tokens for pre-training a language model.",
            "",
            "| split | documents | tokens | bytes of text |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Each split is a safetensors file with one 1-D tensor `tokens`. Tokenizer: {tokenizer}. An end-of-text",
            "token follows each document.",
            "",
            "To train on it with ddp-pretrain, put this into train.json:",
            "",
            f'    "dataset": {json.dumps(name)}',
            "",
            "Where it came from:",
            "",
            *(f"    {line}" for line in source.splitlines()),
            "",
        ]
    )


def _shown(said: Any, key: str) -> str:
    """The number in meta.json, with thousands separators; empty where meta.json does not say it."""
    value = getattr(said, key, None)
    return f"{value:,}" if isinstance(value, int) else ""
