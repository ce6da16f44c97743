"""Parts shared by the benchmarks: the results file, a dataset, run directories, and running ddp_train.py. Does not
import torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from harness.common.files import replace_text

ROOT = Path(__file__).resolve().parents[2]
DATASET = "local/zipf"
GPT2_SMALL = {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12, "n_layers": 12}
TINY = {"vocab_size": 512, "context_length": 32, "emb_dim": 32, "n_heads": 2, "n_layers": 2}
ZIPF_EXPONENT = 1.2
TOKENS = {False: {"train": 30_000_000, "validation": 4_000_000}, True: {"train": 6_500, "validation": 2_000}}
SHOWN_LINES = 12
Row = dict[str, Any]


@dataclass(frozen=True)
class Workbench:
    """Folder `work` for runs and data, and the JSON file `out` for the rows of results. If `tiny` is true, the model
    and the data are small enough for a rehearsal on a CPU."""

    work: Path
    out: Path
    tiny: bool

    @property
    def shape(self) -> dict[str, int]:
        return TINY if self.tiny else GPT2_SMALL

    @property
    def runs(self) -> Path:
        return self.work / "runs"

    def rows(self) -> list[Row]:
        return json.loads(self.out.read_text(encoding="utf-8"))["rows"] if self.out.exists() else []

    def add(self, stage: str, **values: Any) -> None:
        """Print a row and add it to the results file, which is replaced by one rename. Only one process at a time may
        add rows."""
        rounded = {key: float(f"{each:.5g}") if isinstance(each, float) else each for key, each in values.items()}
        row = {"stage": stage, **rounded}
        print(json.dumps(row), flush=True)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.out, json.dumps({"rows": [*self.rows(), row]}, indent=1))

    def write_tables(self) -> Path:
        """Write all rows into a Markdown file beside the JSON file, in one table for each stage, and return its
        path."""
        lines, rows = ["# Measured by bench/on_gpu.py"], self.rows()
        for stage in dict.fromkeys(row["stage"] for row in rows):
            own = [row for row in rows if row["stage"] == stage]
            keys = [key for key in dict.fromkeys(key for row in own for key in row) if key != "stage"]
            lines += ["", f"## {stage}", "", f"| {' | '.join(keys)} |", f"|{'---|' * len(keys)}"]
            lines += [f"| {' | '.join(_cell(row.get(key)) for key in keys)} |" for row in own]
        path = self.out.with_suffix(".md")
        replace_text(path, "\n".join(lines) + "\n")
        return path

    def make_data(self) -> Path:
        """Make the dataset if it is missing, and return DATASETS_DIR. As in text, the frequencies of tokens follow
        Zipf's law, so that a few rows of the embedding get most of the gradients."""
        folder = self.work / "datasets" / DATASET
        if not (folder / "meta.json").exists():
            generator, largest = np.random.default_rng(0), self.shape["vocab_size"] - 1
            counts = TOKENS[self.tiny].items()
            splits = {split: np.minimum(generator.zipf(ZIPF_EXPONENT, count) - 1, largest) for split, count in counts}
            write_dataset(folder, splits)
        return self.work / "datasets"

    def add_run(self, name: str, model: Row, train: Row) -> None:
        """Write a run directory. `model` and `train` hold keys of model.json and train.json that are added to the
        benchmark's own keys or override them."""
        base = {"dataset": DATASET, "start_train_token": 0, "checkpoint_interval": 1000, "clipping_max_norm": 1.0}
        write_run(self.runs / name, {**self.shape, "drop_rate": 0.1, "qkv_bias": False, **model}, base | train)

    def train(self, name: str, *options: str, prelude: str = "", stop_at: str | None = None) -> tuple[Row, str]:
        """Run `ddp_train.py NAME` to its end. Return a row and the whole output. The row has the exit status, the
        seconds, and the first line of the output that begins with "error:".

        `prelude` is Python source that the process runs before ddp_train.py. At the first line of output that begins
        with `stop_at`, the process gets SIGTERM.
        """
        script = ROOT / "ddp_train.py"
        if prelude:
            # runpy is not used, because it would set sys.argv[0] to ddp_train.py. --processes starts the ranks with the
            # command in sys.argv[0], so the ranks would run without the prelude.
            run = f"exec(compile(open({str(script)!r}).read(), 'ddp_train.py', 'exec'))\n"
            script = self.work / "with_prelude.py"
            script.write_text(f"{prelude}\n{run}")
        command = [sys.executable, str(script), name, str(self.make_data()), "--runs-dir", str(self.runs), *options]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths}
        began, lines = time.perf_counter(), []
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                if stop_at and line.startswith(stop_at):
                    process.send_signal(signal.SIGTERM)
                    stop_at = None
        print("\n".join(f"    {line[:200]}" for line in lines[-SHOWN_LINES:]), flush=True)
        error = next((line[:300] for line in lines if line.startswith("error:")), None)
        row = {"status": process.returncode, "seconds": time.perf_counter() - began, "error": error}
        return row, "\n".join(lines)

    def summary(self, name: str) -> Row:
        """Return a run's summary.json, or an empty dict if the run has none."""
        path = self.runs / name / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


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
