"""The speed in a summary is measured only over the steps trained with the current batch on the current machine, also
after a resume."""

from __future__ import annotations

from typing import Any

import pytest

from harness.runs.checkpoint_meta import CheckpointMeta, write_meta
from harness.runs.throughput import same_kernels
from tests.support.in_process import InProcess
from tests.support.launch import meta_of, summary_of

# Keys of meta.json that an earlier version did not write.
NEW_KEYS = {"foreign_tokens", "device", "microbatch_size", "accumulation_steps"}
NEW_KEYS |= {"measured_from_step", "measured_from_tokens", "measured_from_seconds"}


def test_another_world_size_is_measured_anew(shop: InProcess) -> None:
    """After ten steps on one rank, a run resumed on two ranks measures its speed over its own five steps. A deleted
    summary is written again with the number of ranks and the device that trained last."""
    run = shop.add_run(min_train_tokens=640)
    assert shop.attempt().status == 0
    first = summary_of(run)
    assert first["measured"]["tokens"] == first["trained_tokens"] == 640
    shop.add_run(min_train_tokens=1280)
    printed = shop.train(ranks=2).stdout
    second = summary_of(run)
    assert (second["tokens_seen"], second["trained_tokens"], second["world_size"]) == (1280, 1280, 2)
    seconds = second["seconds"]["training"] - second["measured"]["seconds"]
    assert (second["measured"]["tokens"], second["measured"]["global_steps"]) == (640, 5)
    assert seconds == pytest.approx(first["seconds"]["training"], abs=0.1)
    assert second["tokens_per_second"] == pytest.approx(640 / second["measured"]["seconds"], rel=0.02)
    assert "(640 tokens in " in printed
    (run / "summary.json").unlink()
    assert shop.attempt().status == 0
    restored = summary_of(run)
    for key in ("world_size", "microbatch_size", "accumulation_steps", "device", "trained_tokens"):
        assert restored[key] == second[key], key
    assert restored["measured"]["tokens"] == 640


def test_a_checkpoint_of_an_earlier_version_is_measured_from_there(shop: InProcess) -> None:
    """A run resumed from an earlier version's checkpoint measures its speed from that checkpoint on. The checkpoint may
    count tokens of the notebook's program, whose training time is unknown."""
    run = shop.add_run(min_train_tokens=640)
    assert shop.attempt().status == 0
    latest = (run / "checkpoints" / "latest").resolve()
    meta = meta_of(run)
    assert meta.keys() >= NEW_KEYS
    write_meta(latest, CheckpointMeta(**{key: value for key, value in meta.items() if key not in NEW_KEYS}))
    (run / "summary.json").unlink()
    assert shop.attempt().status == 0
    restored = summary_of(run)
    assert (restored["measured"]["tokens"], restored["tokens_per_second"]) == (0, None)
    spent = restored["seconds"]["training"]
    assert spent > 0
    shop.add_run(min_train_tokens=1280)
    assert shop.attempt().status == 0
    after = summary_of(run)
    assert after["tokens_seen"] == 1280
    assert (after["measured"]["tokens"], after["measured"]["global_steps"]) == (640, 10)
    assert after["measured"]["seconds"] == pytest.approx(after["seconds"]["training"] - spent, abs=0.002)
    assert after["tokens_per_second"] == pytest.approx(640 / after["measured"]["seconds"], rel=0.02)


def test_a_step_is_as_fast_if_all_that_is_recorded_agrees() -> None:
    """A recorded step is as fast as the current one if the two agree in all conditions that are recorded for both. A
    condition that is recorded for only one of them is ignored, because an earlier version or another program did not
    write it."""
    train: dict[str, Any] = {"microbatch_size": 2, "precision": "bf16", "learning_rate": 1, "bucket_mb": None}
    train |= {"optimizer": "adamw", "shard_optimizer": False, "deterministic": False, "batch_ramp": None}

    def is_as_fast(recorded: dict[str, Any], **machine: Any) -> bool:
        return CheckpointMeta(global_step=0, train=recorded, **machine).was_as_fast(8, "B200", train)

    assert is_as_fast({})
    assert is_as_fast(train, world_size=8, device="B200")
    assert is_as_fast({"microbatch_size": 2, "learning_rate": 2}, world_size=8)
    assert not is_as_fast({}, world_size=4)
    assert not is_as_fast({}, device="H100")
    assert not is_as_fast({"microbatch_size": 1})
    assert same_kernels({"microbatch_size": 1}, train)
    for key in ("precision", "deterministic", "bucket_mb", "optimizer", "shard_optimizer", "batch_ramp"):
        assert not is_as_fast({key: "another"})
        assert not same_kernels({key: "another"}, train), "a ramp has smaller batches"
