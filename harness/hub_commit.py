"""Files into a repository on the Hugging Face Hub, as one commit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
from huggingface_hub.utils.tqdm import disable_progress_bars

from harness.hub_errors import HubWork

CARD = "README.md"
Operation = huggingface_hub.CommitOperationAdd | huggingface_hub.CommitOperationDelete


def upload(
    work: HubWork, files: dict[str, Path | bytes], message: str, *, public: bool, is_replaced: Callable[[str], bool]
) -> str:
    """Upload files, by their paths in the repository that `work` names, made if it is not there; its address.

    A repository that is there keeps being private or public. What the Hub has already is not sent again. Files there
    of which `is_replaced(path)` is true and that are not among the new ones are removed; they stay in the repository's
    history. Raises UserError.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    api, name, kind = huggingface_hub.HfApi(), work.name, work.kind
    work.call(lambda: api.create_repo(name, repo_type=kind, private=not public, exist_ok=True))
    operations: list[Operation] = [huggingface_hub.CommitOperationAdd(path, file) for path, file in files.items()]
    there = work.call(lambda: api.list_repo_files(name, repo_type=kind))
    stale = [path for path in there if path not in files and is_replaced(path)]
    operations += [huggingface_hub.CommitOperationDelete(path) for path in stale]
    work.call(lambda: api.create_commit(name, operations, commit_message=message, repo_type=kind))
    return f"{api.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"
