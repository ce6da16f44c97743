"""The buckets in which two ranks exchange gradients, as train.json's `bucket_mb` has them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.launch import Workshop

# At the end each rank says in how many buckets its gradients were exchanged.
COUNTED = """
from torch.nn.parallel import DistributedDataParallel
from tests.support.faults import *
wrapped, init = [], DistributedDataParallel.__init__
def made(self, *arguments, **options):
    init(self, *arguments, **options)
    wrapped.append(self)
DistributedDataParallel.__init__ = made
def count():
    sizes = wrapped[0]._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
    print(f"rank {own_rank()}: {len(sizes)} buckets of {max(map(int, sizes))} bytes")
before(END, count)
"""
MIB = 2**20


def test_smaller_buckets_are_more_and_a_run_continues_with_them(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.add_dataset()
    settings = {"min_train_tokens": 512, "validation_interval": 2, "validation_batches": 1}
    found = {}
    for name, bucket_mb in (("usual", None), ("small", 1)):
        shop.add_run(name, model={"emb_dim": 256}, **settings, bucket_mb=bucket_mb)
        printed = shop.train(name, prelude=COUNTED).stdout
        counts = re.findall(r"rank \d: (\d+) buckets of (\d+) bytes", printed)
        assert len(counts) == 2
        assert counts[0] == counts[1]
        found[name] = tuple(map(int, counts[0]))
    assert found["small"][0] > found["usual"][0]
    assert found["usual"][1] > 2 * MIB >= found["small"][1]  # a bucket is closed by the tensor that exceeds it
    checkpoints = shop.runs / "small" / "checkpoints"
    end = (checkpoints / "latest" / "model.safetensors").read_bytes()
    earlier = min(path.name for path in checkpoints.glob("*-iteration-*"))
    shop.train("small", earlier)
    assert (checkpoints / "latest" / "model.safetensors").read_bytes() == end
