"""Rules for the workflows in .github/workflows/: actions are pinned by commit, workflows may only read, and the tests
run on the Python versions that pyproject.toml promises."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from tests.support.isolation import ROOT

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(name="checks")
def _checks() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    loaded: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())
    return loaded


def test_actions_are_pinned_by_commit() -> None:
    used = [line for path in FILES for line in path.read_text().splitlines() if "uses:" in line]
    assert used
    for line in used:
        assert re.fullmatch(r" *- uses: actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_workflows_may_only_read(checks: dict[str, Any]) -> None:
    assert checks["permissions"] == {"contents": "read"}
    assert all("permissions" not in job for job in checks["jobs"].values())


def test_everything_and_the_quick_tests_on_every_python(checks: dict[str, Any]) -> None:
    everything, quick = checks["jobs"]["everything"], checks["jobs"]["quick"]
    assert ".ci/run" in [step.get("run") for step in everything["steps"]]
    pythons = quick["strategy"]["matrix"]["python"]
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert pythons[0] == oldest
    minors = [int(python.removeprefix("3.")) for python in pythons]
    assert minors == list(range(minors[0], minors[0] + len(minors)))
