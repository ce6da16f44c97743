"""The files for schedulers: scripts that shells accept, and what they do for each run of a sweep."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.cluster_files import ClusterJob, skypilot_task, slurm_script
from harness.analysis.derived_runs import write_runs
from harness.common.errors import UserError
from tests.commands.test_cluster_guide import pretend
from tests.support.isolation import ROOT
from tests.support.launch import Workshop
from tests.support.sweeping import load, sweep_command

JOB = ClusterJob("lr", ["lr-seed1", "lr-seed2", "lr-seed3"], Path("my data"), Path("runs"), 4)
SHELLCHECK = shutil.which("shellcheck")


def skypilot() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(skypilot_task(JOB, "A100-80GB"))


def test_bash_accepts_the_scripts() -> None:
    task = skypilot()
    for script in (slurm_script(JOB, 16, None), task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        if SHELLCHECK:
            subprocess.run([SHELLCHECK, "--shell=bash", "-"], input=script, text=True, check=True)


def test_slurm_is_asked_for_a_job_for_each_run() -> None:
    lines = slurm_script(JOB, 16, 2).splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert {"#SBATCH --array=0-2%2", "#SBATCH --gpus-per-node=4", "#SBATCH --cpus-per-task=16"} <= set(lines)
    assert "#SBATCH --array=0-2" in slurm_script(JOB, 16, None).splitlines()


@pytest.mark.parametrize("time_is_up", [True, False])
def test_each_job_of_the_array_trains_its_run_and_stops_no_other(tmp_path: Path, time_is_up: bool) -> None:
    """One job of an array has the whole array's number as its own: by that one all others would be stopped, too."""
    environment = pretend(
        tmp_path / "bin",
        scontrol='echo "scontrol $*" >> "$NOTES"',
        scancel='echo "scancel $*" >> "$NOTES"; kill -TERM "$(cat "$NOTES.srun")"',
        srun='echo $$ > "$NOTES.srun"; for each; do printf "%s|" "$each"; done >> "$NOTES"; echo >> "$NOTES"\n'
        'trap "exit 1" TERM; while [ "$WAIT" ]; do sleep 0.05; done; exit 3',
    )
    environment |= {"SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "1"}
    script = tmp_path / "sweep.sbatch"
    script.write_text(slurm_script(JOB, 16, None))
    process = subprocess.Popen(["bash", str(script)], env=environment | {"WAIT": "1" * time_is_up}, cwd=tmp_path)
    notes = Path(environment["NOTES"])
    if time_is_up:
        while not notes.exists() or not notes.read_text().endswith("\n"):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=15) == (1 if time_is_up else 3), "that of srun"
    first, *rest = notes.read_text().splitlines()
    assert "|torchrun|--standalone|--nproc-per-node=4|" in first
    assert first.endswith("|ddp_train.py|lr-seed2|my data|--runs-dir|runs|")
    assert rest == (["scancel --signal=TERM 70_1", "scontrol requeue 70_1"] if time_is_up else [])


def test_skypilot_launches_a_job_for_each_run(tmp_path: Path) -> None:
    """By the lines that the file begins with."""
    text = skypilot_task(JOB, "A100-80GB")
    (tmp_path / "sweep.yaml").write_text(text)
    loop = "\n".join(line[1:] for line in text.splitlines() if line.startswith("#   "))
    environment = pretend(tmp_path / "bin", sky='echo "$*" >> "$NOTES"')
    subprocess.run(["bash", "-c", loop], env=environment, cwd=tmp_path, check=True, timeout=20)
    asked = "jobs launch --yes --detach-run --name {0} --env RUN={0} sweep.yaml"
    assert Path(environment["NOTES"]).read_text().splitlines() == [asked.format(name) for name in JOB.runs]
    task = skypilot()
    assert task["resources"]["accelerators"] == "A100-80GB:4"
    assert task["envs"] == {"RUN": "lr-seed1"}


def test_skypilot_goes_on_from_what_a_lost_machine_has_kept(tmp_path: Path) -> None:
    script = skypilot()["run"].replace("/kept/", f"{tmp_path}/kept/")
    train = """
        echo "$*" >> "$NOTES"
        folder=runs/lr-seed2/checkpoints/20260101Z000009-iteration-9
        mkdir -p "$folder"; echo weights > "$folder/model.safetensors"; echo 9 > "$folder/meta.json"
        echo line >> runs/lr-seed2/metrics.jsonl; exit 3"""
    variables = {"RUN": "lr-seed2", "SKYPILOT_NUM_GPUS_PER_NODE": "4"}
    for machine, command in (("first", train), ("second", "exit 0")):
        (tmp_path / machine / "runs" / "lr-seed2").mkdir(parents=True)
        environment = pretend(tmp_path / f"{machine}-bin", uv=command) | variables
        done = subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path / machine, timeout=20, check=False)
        assert done.returncode == (3 if machine == "first" else 0)
    asked = (tmp_path / "first-bin" / "notes").read_text()
    assert asked.strip().endswith("--nproc-per-node=4 --max-restarts=3 ddp_train.py lr-seed2 my data --runs-dir runs")
    files = [
        {path.relative_to(tmp_path / each): path.read_text() for path in (tmp_path / each).rglob("*") if path.is_file()}
        for each in ("first", "second")
    ]
    assert files[0] == files[1]
    assert len(files[0]) == 3


def test_skypilot_brings_the_repository_alone() -> None:
    for folder in ("/data/runs", "../runs"):
        with pytest.raises(UserError, match="SkyPilot copies the repository alone; name a folder inside it"):
            skypilot_task(ClusterJob("s", ["r"], Path("d"), Path(folder), 8), "H100")


def test_the_commands_print_them(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.add_run("base")
    sweep = load(shop, vary={"random_seed": [1, 2]})
    unmade = sweep_command(shop, "slurm", "data")
    assert unmade.status == 2
    assert "2 of its 2 runs are not made yet" in unmade.stderr
    write_runs(sweep.runs)
    slurm = sweep_command(shop, "slurm", "data", "--gpus", "2", "--at-once", "1").stdout
    job = ClusterJob("s", ["s-seed1", "s-seed2"], Path("data"), shop.runs, 2)
    assert slurm == slurm_script(job, 32, 1)
    refused = sweep_command(shop, "skypilot", "data")
    assert (refused.status, refused.stdout) == (2, "")
    shown = shop.spawn([sys.executable, str(ROOT / "sweep_runs.py"), "skypilot", "s.json", "data"], {})
    assert shown.communicate(timeout=100)[0] == skypilot_task(replace(job, runs_dir=Path("runs"), gpus=8), "H100")
