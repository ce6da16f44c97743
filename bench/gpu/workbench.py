"""Parts shared by the benchmarks. Does not import torch."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from harness.common.files import replace_text
from harness.planning.estimated_speed import find_device

ROOT = Path(__file__).resolve().parents[2]
DATASET = "local/zipf"
ZIPF_EXPONENT = 1.2
TOKENS = {False: {"train": 30_000_000, "validation": 4_000_000}, True: {"train": 6_500, "validation": 2_000}}
STEPS = {False: 100, True: 16}
# Shipped runs: by the kind of GPU; OTHERS for all other kinds; FAST, with Muon and other options of docs/levers.md.
SHIPPED = {"A100 40GB": "8xa100m40", "A100 80GB": "8xa100m80", "B200": "8xb200m160"}
OTHERS, FAST = "8xh100m80", "8xh100m80-fast"
# Keys of the shipped runs that are replaced: data, amount of training, validation and checkpoints.
SHORT = {"dataset": DATASET, "min_train_tokens": None, "checkpoint_interval": 1000, "keep_checkpoints": None}
SHORT |= dict.fromkeys(("validation_interval", "validation_sequences", "validation_batches", "start_val_token"))
TINY = {"vocab_size": 512, "context_length": 32, "emb_dim": 32, "n_heads": 2, "n_layers": 2}
TINY |= {"bigram_embedding": 64, "value_embeddings": 1}
ALONE = "from bench.gpu.only_rank import train_alone; train_alone()"
SHOWN_LINES = 12
Row = dict[str, Any]


@dataclass(frozen=True)
class Workbench:
    """Folders and results file of a benchmark or its rehearsal."""

    shipped_runs: Path  # the repository's runs
    work: Path  # for runs and data
    out: Path  # JSON file with the rows of all stages
    tiny: bool  # for a rehearsal on a CPU: the model and the data are small
    stage: str = ""  # the stage whose rows `add` adds and `forget` removes

    @property
    def runs(self) -> Path:
        return self.work / "runs"

    @property
    def device(self) -> str:
        """Name of the GPU, or "CPU", as the stage `machine` has recorded it; "" before that stage."""
        return next((row["device"] for row in self.rows() if row["table"] == "machine"), "")

    def rows(self) -> list[Row]:
        return json.loads(self.out.read_text(encoding="utf-8"))["rows"] if self.out.exists() else []

    def add(self, table: str, **values: Any) -> None:
        """Print a row, with floats rounded to five digits, and add it to the results file."""
        rounded = {key: float(f"{each:.5g}") if isinstance(each, float) else each for key, each in values.items()}
        row = {"table": table, "stage": self.stage, **rounded}
        print(json.dumps(row), flush=True)
        self._write([*self.rows(), row])

    def forget(self) -> None:
        """Remove all rows of this stage."""
        self._write([row for row in self.rows() if row["stage"] != self.stage])

    def _write(self, rows: list[Row]) -> None:
        """Replace the results file by one rename. Only one process at a time may call this."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.out, json.dumps({"rows": rows}, indent=1))

    def write_tables(self) -> Path:
        """Write all rows into a Markdown file beside the JSON file, in one table for each kind, and return its path."""
        lines, rows = ["# Measured by bench/on_gpu.py"], self.rows()
        for table in dict.fromkeys(row["table"] for row in rows):
            own = [row for row in rows if row["table"] == table]
            keys = [key for key in dict.fromkeys(key for row in own for key in row) if key != "table"]
            lines += ["", f"## {table}", "", f"| {' | '.join(keys)} |", f"|{'---|' * len(keys)}"]
            lines += [f"| {' | '.join(_cell(row.get(key)) for key in keys)} |" for row in own]
        path = self.out.with_suffix(".md")
        replace_text(path, "\n".join(lines) + "\n")
        return path

    def make_data(self) -> Path:
        """Make the dataset if it is missing, and return DATASETS_DIR."""
        folder = self.work / "datasets" / DATASET
        if not (folder / "meta.json").exists():
            generator, largest = np.random.default_rng(0), self.shipped()[0]["vocab_size"] - 1
            counts = TOKENS[self.tiny].items()
            # Zipf's law, as in text: a few rows of the embedding get most of the gradients.
            splits = {split: np.minimum(generator.zipf(ZIPF_EXPONENT, count) - 1, largest) for split, count in counts}
            write_dataset(folder, splits)
        return self.work / "datasets"

    def shipped(self, *, fast: bool = False) -> tuple[Row, Row]:
        """Return model.json and train.json of the run FAST if `fast`, else of the run for this machine's GPU (SHIPPED,
        OTHERS). In a rehearsal, model and microbatch are smaller."""
        device = find_device(self.device)
        run = self.shipped_runs / (FAST if fast else SHIPPED.get(device.name if device else "", OTHERS))
        model, train = (json.loads((run / f"{name}.json").read_text(encoding="utf-8")) for name in ("model", "train"))
        if self.tiny:
            model |= {key: size for key, size in TINY.items() if key in model}
            train["microbatch_size"] = 4
        return model, train

    def add_run(self, name: str, model: Row, train: Row, *, fast: bool = False) -> None:
        """Write the directory of a short run: the run that `shipped(fast=fast)` returns, with few steps and no warm-up,
        and with the keys in `model` and `train`."""
        shipped_model, shipped_train = self.shipped(fast=fast)
        steps = {"train_steps": STEPS[self.tiny], "warmup_steps": 0}
        write_run(self.runs / name, shipped_model | model, shipped_train | SHORT | steps | train)

    def train(
        self, name: str, *options: str, ddp: bool = False, signal_at: tuple[str, int] | None = None
    ) -> tuple[Row, str]:
        """Run `ddp_train.py NAME` to its end. Return a row about it, and its whole output.

        The row has the exit status, the seconds, and the first line that begins with "error:" (or None). With `ddp`,
        the single rank trains as if it were one of several. `signal_at` is a pair: a text, and the signal to send at
        the first line that begins with it.
        """
        program = ["-c", ALONE] if ddp else ["ddp_train.py"]
        command = [sys.executable, *program, name, str(self.make_data()), "--runs-dir", str(self.runs), *options]
        began, lines = time.perf_counter(), []
        with Popen(command, cwd=ROOT, stdout=PIPE, stderr=STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                if signal_at and line.startswith(signal_at[0]):
                    process.send_signal(signal_at[1])
                    signal_at = None
        print("\n".join(f"    {line[:200]}" for line in lines[-SHOWN_LINES:]), flush=True)
        error = next((line[:300] for line in lines if line.startswith("error:")), None)
        row = {"status": process.returncode, "seconds": time.perf_counter() - began, "error": error}
        return row, "\n".join(lines)


def require(is_true: bool, what: str) -> None:
    """End this process, and so the stage, as failed, unless `is_true`."""
    if not is_true:
        sys.exit(what)


def write_dataset(folder: Path, splits: dict[str, np.ndarray]) -> None:
    """Write a dataset folder with the tokens of each split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, tokens in splits.items():
        save_file({"tokens": tokens.astype(np.uint16)}, folder / f"{split}.safetensors")
    (folder / "meta.json").write_text(json.dumps({"description": "made by a benchmark", "token_dtype": "uint16"}))


def write_run(folder: Path, model: Row, train: Row) -> None:
    """Write a run directory with this model.json and train.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(json.dumps(model))
    (folder / "train.json").write_text(json.dumps(train))


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    text = f"{value:,}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value or "")
    return " ".join(text.replace("|", "\\|").split())
