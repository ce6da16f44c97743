"""Files that hand a sweep to a cluster's scheduler, a job for each run; docs/CLUSTER.md has those of single runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import UserError


@dataclass(frozen=True)
class ClusterJob:
    """What all jobs of a sweep have in common. Each run gets one node with `gpus` GPUs."""

    sweep: str
    runs: Sequence[str]
    datasets_dir: Path
    runs_dir: Path
    gpus: int


SLURM = """\
#!/usr/bin/env bash
# The runs of the sweep {sweep}, one job each; first, once: uv sync
# `sbatch` with this file again continues what is not finished, and does nothing to what is.
#SBATCH --job-name={sweep}
#SBATCH --array=0-{last}{at_once}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1         # torchrun; it starts a process for each GPU
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task={cpus}
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300         # tell this script 300 seconds before the time limit
#SBATCH --requeue                   # and start it again after a preemption or a node's failure
#SBATCH --open-mode=append
#SBATCH --output=slurm-%A-%a.log

RUNS=(
{runs}
)
RUN=${{RUNS[$SLURM_ARRAY_TASK_ID]}}
# Of this job alone: SLURM_JOB_ID of one of them is the whole array's.
JOB=${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}

time_is_up=
trap 'time_is_up=yes; scancel --signal=TERM "$JOB"' USR1   # reaches torchrun, not this script
srun uv run --no-sync torchrun --standalone --nproc-per-node={gpus} --max-restarts=3 \\
    --shutdown-timeout=240 ddp_train.py "$RUN" {datasets} --runs-dir {runs_dir} &
wait "$!"
status=$?
if [ -n "$time_is_up" ]; then
    wait "$!" || status=$?          # for the checkpoint: the signal ended the first wait
    scontrol requeue "$JOB"
fi
exit "$status"
"""

SKYPILOT = """\
# The runs of the sweep {sweep}, a managed job each. With this file as sweep.yaml:
#
#   sed -n 's/^# run: //p' sweep.yaml | while read -r run; do
#     sky jobs launch --yes --detach-run --name "$run" --env RUN="$run" sweep.yaml < /dev/null
#   done
#
{runs}
workdir: .
resources:
  accelerators: {accelerators}
  use_spot: true
  disk_size: 500
  job_recovery:
    max_restarts_on_errors: 3
file_mounts:
  /kept:
    name: my-pretraining-runs       # a bucket; it is made if there is none
    mode: MOUNT_CACHED
envs:
  RUN: {first}
setup: |
  ./setup_lambda.sh
  PATH="$HOME/.local/bin:$PATH" uv sync
run: |
  export PATH="$HOME/.local/bin:$PATH"
  here={runs_dir}/"$RUN" kept="/kept/$RUN"
  mkdir -p "$here/checkpoints" "$kept/checkpoints"
  for meta in "$kept"/checkpoints/2*/meta.json; do
    if [ -e "$meta" ]; then cp -r "${{meta%/*}}" "$here/checkpoints/"; fi
  done
  if [ -e "$kept/metrics.jsonl" ]; then cp "$kept/metrics.jsonl" "$here/"; fi
  keep() {{
    for path in "$here"/checkpoints/2*; do
      copy="$kept/checkpoints/${{path##*/}}"
      if [ -e "$path/meta.json" ] && ! [ -e "$copy/meta.json" ]; then
        mkdir -p "$copy"
        find "$path" -type f ! -name meta.json -exec cp -t "$copy" {{}} + &&
          cp "$here/metrics.jsonl" "$kept/" && cp "$path/meta.json" "$copy/"
      fi
    done
    find "$here" -maxdepth 1 -type f ! -name '.*' -exec cp -t "$kept" {{}} +
  }}
  while sleep 60; do keep; done &
  uv run torchrun --standalone --nproc-per-node="$SKYPILOT_NUM_GPUS_PER_NODE" --max-restarts=3 \\
    ddp_train.py "$RUN" {datasets} --runs-dir {runs_dir}
  status=$?
  kill "$!"
  keep
  exit "$status"
"""


def slurm_script(job: ClusterJob, cpus: int, at_once: int | None) -> str:
    """A Slurm array with a job for each run, at most `at_once` of them at a time. The repository, and the folders of
    runs and datasets, are on a file system that all nodes share."""
    return SLURM.format(
        sweep=job.sweep,
        last=len(job.runs) - 1,
        at_once=f"%{at_once}" if at_once else "",
        gpus=job.gpus,
        cpus=cpus,
        runs="\n".join(f"    {name}" for name in job.runs),
        datasets=shlex.quote(str(job.datasets_dir)),
        runs_dir=shlex.quote(str(job.runs_dir)),
    )


def skypilot_task(job: ClusterJob, accelerator: str) -> str:
    """A SkyPilot task that trains the run which the variable RUN names, and how to launch it for each. Raises UserError
    for runs outside the repository, which is all that SkyPilot brings to a machine."""
    if job.runs_dir.is_absolute() or ".." in job.runs_dir.parts:
        raise UserError(f"--runs-dir {job.runs_dir}: SkyPilot copies the repository alone; name a folder inside it")
    return SKYPILOT.format(
        sweep=job.sweep,
        runs="\n".join(f"# run: {name}" for name in job.runs),
        accelerators=f"{accelerator}:{job.gpus}",
        first=job.runs[0],
        datasets=shlex.quote(str(job.datasets_dir)),
        runs_dir=shlex.quote(str(job.runs_dir)),
    )
