"""A killed run, from which the tests of damaged checkpoints, failing disks and locks start."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

from harness.runs import checkpoints
from tests.support import file_operations
from tests.support.jobs import start
from tests.support.launch import SAVED_OFTEN, Workshop, finish

# With fp16 and a tokenizer, a checkpoint has all the files that it can have.
SETTINGS = SAVED_OFTEN | {"min_train_tokens": 64 * 11, "precision": "fp16"}
FILES = ("model.safetensors", "optimizer.pt", "scaler.pt", "train_state.pt", "letters.json", "meta.json")


def build_stopped_run(path: Path) -> Workshop:
    """Train an undisturbed run on one rank, and one that is killed after step 6: its `latest` is step 6 and its `best`
    is step 4."""
    shop = Workshop(path)
    folder = shop.add_dataset(tokens=8000)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": "letters.json"}))
    (folder / "letters.json").write_text(json.dumps({"letters": 64}))
    shop.add_run("straight", **SETTINGS)
    shop.train("straight", ranks=1)
    stopped = shop.add_run("stopped", **SETTINGS)
    killed = file_operations.prelude("save", 4, "kill", 0)
    result = shop.train("stopped", ranks=1, prelude=killed, expect=-signal.SIGKILL)
    assert {path.name for path in (stopped / "checkpoints" / "latest").iterdir()} == set(FILES), result
    assert steps_of(stopped) == ([0, 2, 4, 6], 6, 4)
    return shop


def steps_of(run: Path) -> tuple[list[int], int | None, int | None]:
    """Return the steps of all checkpoints, of `latest` and of `best`. The last two are None without such a
    checkpoint."""
    folder = run / "checkpoints"
    at = {path.name: step for step, path in checkpoints.list_checkpoints(folder)}
    latest, best = (at.get((folder / link).resolve().name) for link in ("latest", "best"))
    return sorted(at.values()), latest, best


def copy_of_stopped(shop: Workshop, name: str) -> Path:
    return Path(shutil.copytree(shop.runs / "stopped", shop.runs / name, symlinks=True))


def operations_of(shop: Workshop, call: str, number: int, *arguments: str) -> list[str]:
    """Return the file operations of a call, in a new run or, if there are `arguments`, in a copy of `stopped` that is
    resumed with them."""
    name, path = f"count-{call.replace(' ', '-')}", shop.path / f"count-{call}"
    run = copy_of_stopped(shop, name) if arguments else shop.add_run(name, **SETTINGS)
    prelude = file_operations.prelude(call, number, "log", path)
    finish(start(shop, run.name, *arguments, prelude=prelude), expect=0, timeout=60)
    return path.read_text().splitlines()
