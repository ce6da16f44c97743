"""Measure training on one GPU, by default in at most half an hour.

    uv run bench/on_gpu.py                                   # all stages, the most decisive first
    uv run bench/on_gpu.py "step --fast --microbatch 13"     # one stage, with options of its own

Each stage is a process with its own time limit; if it fails, the next stages still run. If the command is run again
without stages, it runs those that have not succeeded yet. All rows are written into one JSON file (--out), and as
tables into a Markdown file beside it. At the end, the rows of the table in docs/performance.md that are for this GPU
are printed, with the measured speed in their last column. However the command ends, its stages end with it.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import click

# `python bench/...` puts bench/ on the path, not the repository root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu.workbench import ROOT, Workbench
from harness.common.program import gpu_names
from harness.planning.estimated_speed import find_device

TABLE = ROOT / "docs" / "performance.md"
POLL_SECONDS = 0.5
SECONDS = 1740.0
# Time limit in seconds of each stage if --seconds is SECONDS (otherwise scaled). A key is a stage with its options. The
# most decisive stages come first.
LIMIT_SECONDS = {
    "machine": 40,
    "step --fast --ddp": 180,
    "step --ddp": 140,
    "step": 110,
    "search": 330,
    "continue": 220,
    "saving": 110,
    "attention": 50,
    'step --model drop_rate=0 --set attention="flash"': 75,
    "loss": 60,
    'step --model moe={"num_experts":8,"num_active_experts":2}': 110,
    'step --set residual_precision="bf16"': 75,
    "nanogpt": 110,
    "step --ddp --set bucket_mb=100": 75,  # fewer cuts of the compiled graph, and less overlap with the exchange
}
# The module of bench/gpu that has the function measure_NAME of a stage.
MODULES = dict.fromkeys(("machine", "attention", "loss", "nanogpt"), "kernels")
MODULES |= dict.fromkeys(("step", "search", "continue", "saving"), "training")
STAGE = "from bench.on_gpu import run_stage; run_stage()"


def run_stages(bench: Workbench, stages: list[str], seconds: float) -> bool:
    """Run each stage in its own process, one after another, and record its status. Kill a stage after its time limit,
    scaled by `seconds` / SECONDS. Return True if all succeeded."""
    statuses: list[int | str] = []
    for stage in stages:
        own = replace(bench, stage=stage)
        own.forget()
        began, limit = time.monotonic(), LIMIT_SECONDS.get(stage, 240) * seconds / SECONDS
        given = [str(os.getpid()), stage, *map(str, (bench.shipped_runs, bench.work, bench.out))]
        command = [sys.executable, "-c", STAGE, *given, "tiny" if bench.tiny else ""]
        # The stage has its own process group, so that the processes that it starts are killed with it.
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            status: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(bench.runs, ignore_errors=True)  # gigabytes of checkpoints
        own.add("stages", status=status, seconds=time.monotonic() - began)
        statuses.append(status)
    return not any(statuses)


def run_stage() -> None:
    """Run the stage that sys.argv names. If the command that started this process ends first, even by SIGKILL, kill
    this process group."""
    parent, stage, shipped_runs, work, out, tiny = sys.argv[1:]

    def end_with_command() -> None:
        while os.getppid() == int(parent):
            time.sleep(POLL_SECONDS)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_command, daemon=True).start()
    name, *options = stage.split()
    # Only the modules of some stages import torch, which takes seconds.
    measure = getattr(importlib.import_module(f"bench.gpu.{MODULES[name]}"), f"measure_{name}")
    measure(Workbench(Path(shipped_runs), Path(work), Path(out), bool(tiny), stage), *options)


def measured_rows(bench: Workbench) -> list[str]:
    """Return the rows for this machine's GPU in the table of docs/performance.md, or new rows if it has none. The last
    column has the tokens/s measured with DistributedDataParallel. A row that was not measured is left out."""
    device, rows = find_device(bench.device), []
    known = TABLE.read_text(encoding="utf-8").splitlines()
    speeds = {row["stage"]: row.get("tokens_per_second") for row in bench.rows() if row["table"] == "step"}
    for stage, suffix in (("step --ddp", ""), ("step --fast --ddp", ", `-fast`")):
        if bench.device and (speed := speeds.get(stage)):
            start = f"| {f'8 x {device.name}' if device else f'1 x {bench.device}'}{suffix} |"
            row = next((line for line in known if line.startswith(start)), f"{start} – | – | – | – | – | – |")
            rows.append(f"{row.rsplit('|', 2)[0]}| {speed / 1000:,.4g}k |")
    return rows


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    ") if __doc__ else None)
@click.argument("stages", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), help="File for the numbers.  [default: on_gpu[_tiny].json]")
@click.option(
    "--seconds",
    type=float,
    default=SECONDS,
    show_default=True,
    help="Time limit of a run of all stages. Each stage has a fixed share of it.",
)
@click.option("--tiny", is_flag=True, help="Rehearse with shapes that are small enough for a CPU.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=ROOT / "runs", help="Folder of the shipped runs.")
def main(stages: tuple[str, ...], out: Path | None, seconds: float, tiny: bool, runs_dir: Path) -> None:
    for stage in stages:
        if stage.split()[:1] not in [[name] for name in MODULES]:
            raise click.UsageError(f"{stage!r}: no such stage; the stages are {', '.join(MODULES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the temporary runs are removed
    out = (out or Path("on_gpu_tiny.json" if tiny else "on_gpu.json")).resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="on_gpu-", dir=out.parent, ignore_cleanup_errors=True) as work:
        bench = Workbench(runs_dir.resolve(), Path(work), out, tiny)
        here, measured = gpu_names(), bench.device.split(" MIG ")[0]  # the driver does not name the part of a GPU
        if here and measured not in ("", *here):
            raise click.UsageError(f"{out} has the results of {measured}, not of {here[0]}; give another --out")
        done = [row["stage"] for row in bench.rows() if row["table"] == "stages" and row["status"] == 0]
        wanted = [*(stages or [each for each in LIMIT_SECONDS if each not in done])]
        if not bench.device and "machine" not in wanted:  # which shipped runs are trained depends on the GPU
            wanted.insert(0, "machine")
        succeeded = run_stages(bench, wanted, seconds)
    print("", bench.write_tables(), *measured_rows(bench), sep="\n", flush=True)
    sys.exit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
