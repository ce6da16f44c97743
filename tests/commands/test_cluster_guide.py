"""The recipes of docs/CLUSTER.md: their scripts are valid in a shell, and react as they should to the scheduler."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import ddp_train
from tests.support.isolation import ROOT

GUIDE = ROOT / "docs" / "CLUSTER.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def slurm_script() -> str:
    (script,) = [block for block in blocks("bash") if "#SBATCH" in block]
    return script


def skypilot_task() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    (task,) = [yaml.safe_load(block) for block in blocks("yaml")]
    return task


def pretend(folder: Path, **commands: str) -> dict[str, str]:
    """Write shell scripts in place of commands that this machine does not have. Return the environment in which they
    are found."""
    folder.mkdir()
    for name, script in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "NOTES": str(folder / "notes")}


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_are_clean() -> None:
    task = skypilot_task()
    for script in (*blocks("bash"), task["setup"], task["run"]):
        subprocess.run(["shellcheck", "--shell=bash", "-"], input=script, text=True, check=True)


def test_a_sweep_is_a_job_for_each_run(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    loops = re.findall(r"^```bash\n(for .*?)^```$", guide, re.MULTILINE | re.DOTALL)
    environment = pretend(
        tmp_path / "bin",
        sbatch='echo "RUN=$RUN $*" >> "$NOTES"',
        sky='echo "$*" >> "$NOTES"',
    )
    for name in ("lr-a", "lr-b", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for loop in loops:
        subprocess.run(["bash", "-c", loop], env=environment, cwd=tmp_path, check=True, timeout=60)
    launch = "jobs launch --yes --detach-run --secret HF_TOKEN --num-nodes=1 --name {0} --env RUN={0} train.yaml"
    assert Path(environment["NOTES"]).read_text().splitlines() == [
        *(f"RUN={name} --nodes=1 --job-name={name} train.sbatch" for name in ("lr-a", "lr-b")),
        *(launch.format(name) for name in ("lr-a", "lr-b")),
    ]
    assert 'RUN="${RUN:-' in slurm_script()
    assert "RUN" in skypilot_task()["envs"]
    assert skypilot_task()["secrets"] == {"HF_TOKEN": None}, "each command must give it"
    for path in (ROOT / "docs").glob("*.md"):
        for command in re.findall(r"sky (?:jobs )?launch[^`<]*train.yaml[^`<]*", path.read_text(encoding="utf-8")):
            assert "--secret HF_TOKEN" in command


def test_jobs_that_are_started_again_wait_for_the_mirror() -> None:
    """A machine that was lost keeps its lease on a run's mirror for minutes."""
    for script in (slurm_script(), skypilot_task()["run"]):
        assert re.search(r'ddp_train\.py "\$RUN" datasets.* --wait', script)


@pytest.mark.parametrize(("time_is_up", "preempted"), [(True, "None"), (False, "2026-11-29T01:15:01"), (False, "None")])
def test_slurm_requeues_what_its_time_limit_stopped(tmp_path: Path, time_is_up: bool, preempted: str) -> None:
    """A job that its time limit or a preemption stopped is requeued, and a job that failed is not, although torchrun
    ends with status 1 in all cases."""
    environment = pretend(
        tmp_path / "bin",
        scontrol=f"""case "$2" in
            hostnames) printf "first\\nsecond\\n";;
            job) echo "   PreemptEligibleTime=2026-11-29T01:00:00 PreemptTime={preempted}";;
            *) echo "scontrol $*" >> "$NOTES";; esac""",
        scancel='echo "scancel $*" >> "$NOTES"; pkill -TERM -P "$(cat "$NOTES.srun")"',
        srun='echo $$ > "$NOTES.srun"; echo "from $MAIN_NODE, $SRUN_CPUS_PER_TASK cores" >> "$NOTES"\n'
        'sleep "$SECONDS_TO_TRAIN"; exit 1',
        uv="true",
    )
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x", "SECONDS_TO_TRAIN": "100" if time_is_up else "0"}
    environment["SLURM_CPUS_PER_TASK"] = "32"
    script = tmp_path / "train.sbatch"
    script.write_text(slurm_script())
    process = subprocess.Popen(["bash", str(script)], env=environment, cwd=tmp_path)
    notes = Path(environment["NOTES"])
    if time_is_up:
        while not notes.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR1)
    process.wait(timeout=60)
    asked = ["scancel --signal=TERM 7"] if time_is_up else []
    asked += ["scontrol requeue 7"] if time_is_up or preempted != "None" else []
    assert notes.read_text().splitlines() == ["from first, 32 cores", *asked]
    assert process.returncode != 0


def test_skypilot_continues_from_the_mirror(tmp_path: Path) -> None:
    """Each node starts torchrun with its own number, the first node's address and the mirror."""
    environment = pretend(tmp_path / "bin", uv='printf "%s\\n" "$@" > "$NOTES"')
    environment |= {"HOME": str(tmp_path), "RUN": "r", "MIRROR": "hf://buckets/me/runs", "SKYPILOT_NODE_RANK": "1"}
    environment |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    environment |= {"SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    subprocess.run(["bash", "-c", skypilot_task()["run"]], env=environment, check=True, timeout=60)
    words = Path(environment["NOTES"]).read_text().splitlines()
    assert words[:7] == [
        *("run", "torchrun", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500"),
        "--nproc-per-node=8",
    ]
    script, *arguments = words[words.index("ddp_train.py") :]
    with ddp_train.main.make_context(script, arguments) as context:
        assert context.params["mirror"] == "hf://buckets/me/runs"
        assert context.params["wait"]


def test_skypilot_uploads_the_files_of_the_runs_that_ship() -> None:
    """SkyPilot leaves out what .skyignore lists, whether git tracks it or not."""
    listed = ["git", "ls-files", "--cached", "--ignored"]
    for patterns, shows in (("--exclude-from=.skyignore", False), ("--exclude=/runs/8xh100m80/*", True)):
        found = subprocess.run([*listed, patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        assert ("runs/8xh100m80/train.json" in found) == shows
        assert shows or not found
