"""Measure training on one GPU, in ten minutes.

    uv run bench/on_gpu.py                         # all stages, the most decisive first
    uv run bench/on_gpu.py step --microbatch 13    # one stage alone

Each stage is a process with its own time limit; if it fails, the next stages still run. If the command is run again, it
repeats only the stages that failed or for which no time was left. All rows are written into one JSON file (--out), and
as tables into a Markdown file beside it. --tiny is a rehearsal that runs on any machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

# `python bench/...` puts bench/ on the path, not the repository root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu import kernels, training
from bench.gpu.workbench import Workbench

LEAST_SECONDS = 15.0  # with less time left, no further stage is started
# Time limits of the stages in seconds. A key is a stage with its options. The most decisive stages come first, because
# time may run out.
LIMIT_SECONDS = {
    "machine": 60,
    "ceilings": 90,
    "step": 180,
    "search": 280,
    "stop-and-continue": 240,
    "attention": 90,
    "loss": 180,
    "saving": 200,
    "step --microbatch 13": 120,
    "step --drop-rate 0": 120,
    "step --drop-rate 0.125": 120,
    "step --set compile=false": 120,
    'step --set precision="bf16" --set residual_precision="bf16"': 120,
    "step --set activation_checkpointing=true": 120,
    "step --set coordinate_descent_tuning=true": 240,
}
STAGES = {
    "machine": kernels.measure_machine,
    "ceilings": kernels.measure_ceilings,
    "attention": kernels.measure_attention,
    "loss": kernels.measure_loss,
    "search": training.measure_search,
    "stop-and-continue": training.measure_stop_and_continue,
    "saving": training.measure_saving,
}


def run_stages(bench: Workbench, passed_on: list[str], seconds: float) -> None:
    """Run each stage that is not done yet in its own process, with the options `passed_on`. Kill a stage after its
    LIMIT_SECONDS, and the last one when `seconds` are over. Then write the tables."""
    deadline = time.monotonic() + seconds
    done = {row["what"] for row in bench.rows() if row["stage"] == "stages" and row["status"] == 0}
    for stage, limit in LIMIT_SECONDS.items():
        left = deadline - time.monotonic()
        if stage in done:
            continue
        if left < LEAST_SECONDS:
            bench.add("stages", what=stage, status="no time left")
            continue
        began = time.monotonic()
        # The stage gets its own process group, so that training processes that it has started are killed with it.
        process = subprocess.Popen([sys.executable, __file__, *stage.split(), *passed_on], start_new_session=True)
        try:
            status: int | str = process.wait(min(limit, left))
        except subprocess.TimeoutExpired:
            status = f"stopped after {min(limit, left):.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        bench.add("stages", what=stage, status=status, seconds=time.monotonic() - began)
    print(f"\n{bench.write_tables()}", flush=True)


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    ") if __doc__ else None)
@click.argument("stage", required=False, type=click.Choice([*STAGES, "step"]))
@click.option("--out", type=click.Path(path_type=Path), default=Path("on_gpu.json"), show_default=True)
@click.option("--work", type=click.Path(path_type=Path), default=Path("/tmp/on_gpu"), show_default=True)
@click.option("--seconds", type=float, default=570.0, show_default=True, help="For all stages together.")
@click.option("--tiny", is_flag=True, help="Shapes small enough for a rehearsal on a CPU.")
@click.option("--microbatch", type=int, default=64, show_default=True, help="For the stage `step`.")
@click.option("--drop-rate", type=float, default=0.1, show_default=True, help="For the stage `step`.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=JSON", help="Set a train.json key, for the stage `step`."
)
def main(
    stage: str | None, out: Path, work: Path, seconds: float, tiny: bool, settings: tuple[str, ...], **step: Any
) -> None:
    bench = Workbench(work.resolve(), out.resolve(), tiny)
    bench.work.mkdir(parents=True, exist_ok=True)
    if stage is None:
        passed_on = ["--out", str(bench.out), "--work", str(bench.work), *(["--tiny"] if tiny else [])]
        run_stages(bench, passed_on, seconds)
    elif stage == "step":
        keys = {key: json.loads(value) for key, _, value in (each.partition("=") for each in settings)}
        training.measure_step(bench, keys, **step)
    else:
        STAGES[stage](bench)


if __name__ == "__main__":
    main()
