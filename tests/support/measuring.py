"""Ways to run test_loss.py on a workshop's runs, and the losses that it keeps in them."""

from __future__ import annotations

from pathlib import Path

from harness.runs.directory import RunDirectory
from harness.runs.results import LossResult, read_results
from tests.support.in_process import call
from tests.support.launch import Result, Workshop


def files_of(run: Path, checkpoint: str = "best") -> list[str]:
    return [str(run / "model.json"), str(run / "checkpoints" / checkpoint / "model.safetensors")]


def measure(shop: Workshop, *arguments: object) -> Result:
    options = [shop.datasets, *arguments, "--runs-dir", shop.runs]
    result = call("test_loss", *options, folder=shop.path, environment=shop.environment)
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    return result


def losses_in(run: Path) -> list[LossResult]:
    results = read_results(RunDirectory(run))
    assert results.problems == []
    return results.of(LossResult)


def checkpoint_of_step(run: Path, step: int) -> str:
    [path] = (run / "checkpoints").glob(f"*-iteration-{step}")
    return path.name
