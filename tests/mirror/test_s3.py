"""A mirror on a real S3 server, and the loss of that server while a run trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.mirror.fetch import newest_in_mirror
from harness.mirror.store import Mirror
from tests.mirror.test_two_machines import SETTINGS, STEPS, STOP, add_machine
from tests.support.launch import Workshop
from tests.support.s3_server import BUCKET, SECRET, s3_server
from tests.support.same_end import assert_same_end

URL = f"s3://{BUCKET}/runs"


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as variables:
        yield variables


def machine_at(folder: Path, server: dict[str, str], **settings: object) -> Workshop:
    shop = Workshop(folder, environment=server)
    shop.add_dataset()
    shop.add_run("r", **SETTINGS | {"mirror": URL, "keep_checkpoints": 1} | settings)
    return shop


def test_two_machines_on_s3(tmp_path: Path, server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine_at(tmp_path / "first", server, **STOP)
    first.train(ranks=1)
    second = machine_at(tmp_path / "second", server)
    trained = second.train(ranks=1)
    assert "is from the mirror" in trained.stdout
    straight = add_machine(tmp_path, "straight", mirror=None)
    straight.train_here()
    assert_same_end(straight.runs / "r", second.runs / "r")
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    mirror = Mirror(URL, "r")
    files = mirror.files()
    found = newest_in_mirror(mirror, files)
    assert found is not None
    assert found[1].global_step == STEPS - 1
    assert "owner.json" not in files
    assert len([name for name in files if name.endswith("meta.json")]) <= 3
    for path in (second.runs / "r").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
    listed = second.script("mirror.py", "list", URL)
    assert listed.stdout.startswith(f"r: {found[0]}")


@pytest.mark.slow  # botocore tries again and again
def test_a_bucket_that_is_not_there_or_not_ours_is_one_line(tmp_path: Path, server: dict[str, str]) -> None:
    shop = machine_at(tmp_path, server, mirror="s3://nowhere/runs")
    refused = shop.attempt()
    assert refused.status == 2
    assert "s3://nowhere/runs/r: cannot be written" in refused.stderr
    assert "AWS_ACCESS_KEY_ID" in refused.stderr
    shop.environment = {**server, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}  # no server
    refused = shop.attempt()
    assert refused.status == 2
    assert len(refused.stderr.splitlines()) == 1
    shop.environment = {name: value for name, value in server.items() if "KEY" not in name}
    refused = shop.attempt()
    assert refused.status == 2
    assert "redential" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not (shop.runs / "r" / "metrics.jsonl").exists()
