"""A mirror in a bucket of the Hub: a loopback server, with the real huggingface_hub and hf_xet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mirror.test_two_machines import SETTINGS, STOP, add_machine
from tests.support.bucket_hub import BUCKET, TOKEN, bucket_hub
from tests.support.launch import Workshop
from tests.support.same_end import assert_same_end

URL = f"hf://buckets/{BUCKET}/gpt"


@pytest.mark.slow
def test_two_machines_with_a_bucket(tmp_path: Path) -> None:
    with bucket_hub(tmp_path / "hub") as environment:
        first, second = (Workshop(tmp_path / name, environment=environment) for name in ("first", "second"))
        for shop, settings in ((first, STOP), (second, {})):
            shop.add_dataset()
            shop.add_run("r", **SETTINGS | {"mirror": URL, "keep_checkpoints": 1} | settings)
        began = first.train(ranks=1)
        trained = second.train(ranks=1)
        assert began.stderr + trained.stderr == "", "huggingface_hub writes nothing into the output of training"
        assert "is from the mirror" in trained.stdout
        straight = add_machine(tmp_path, "straight", mirror=None)
        straight.train_here()
        assert_same_end(straight.runs / "r", second.runs / "r")
        newest = (second.runs / "r" / "checkpoints" / "latest").resolve().name
        assert second.script("mirror.py", "list", URL).stdout.startswith(f"r: {newest}")
        for path in (second.runs / "r").rglob("*"):
            assert not path.is_file() or TOKEN.encode() not in path.read_bytes()

        second.environment = {**environment, "HF_TOKEN": "hf_another"}
        refused = second.attempt()
        assert refused.status == 2
        assert "HF_TOKEN or `hf auth login`" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
