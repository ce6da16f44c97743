"""Find the attention kernels that torch chooses on the null device, and print them in a line of JSON for each case.

    python -m tests.nullcuda.attention '[{"attention": "auto", "wheel": true}, {"attention": "flash"}]'

A case has train.json's `attention`, may have keys of model.json and train.json, and says with "wheel" if FlashAttention
3 is installed. The line has the kernels, in the order of their first calls, of a training step (its recomputation
included), a validation and a sample; the kernel that the run records and torch's compile cache knows; or the error that
refuses the case.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from harness.common.errors import UserError
from harness.data.loader import Microbatch
from harness.distributed.world import World
from harness.evaluation.generation import GREEDY, continue_prompts
from harness.evaluation.loss import microbatch_losses
from harness.model.config import ModelConfig
from harness.model.kernels import attention_in_use
from harness.runs.train_config import TrainConfig
from tests.nullcuda import steps

MODEL = {"vocab_size": 64, "context_length": 64, "emb_dim": 128, "n_heads": 2, "n_layers": 2, "qkv_bias": False}
TRAIN = {"dataset": "a/b", "microbatch_size": 2, "train_steps": 9, "start_train_token": 0, "checkpoint_interval": 1}
TRAIN |= {"compile": False, "precision": "bf16", "activation_checkpointing": True}
INTERFACE = "flash_attn_interface"  # the module of FlashAttention 3
attention, chosen, newer = F.scaled_dot_product_attention, list[str](), list[str]()


def noted(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **how: Any) -> Tensor:
    """Note the kernel that torch chooses for this call, and run it. cuDNN's, which asks the hardware, is not run."""
    name = SDPBackend(torch._fused_sdp_choice(q, k, v, attn_mask, **how)).name
    chosen.append(name)
    return v * 1.0 if name == "CUDNN_ATTENTION" else attention(q, k, v, attn_mask, **how)


def install() -> None:
    """Make FlashAttention 3 importable, with kernels that note their calls and compute nothing."""

    def forward(q: Tensor, *others: Any) -> tuple[Tensor, Tensor, None, None]:
        newer.append("forward")
        return others[5], q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32), None, None

    torch.ops.flash_attn_3 = SimpleNamespace(fwd=forward, bwd=lambda *_: newer.append("backward"))  # type: ignore[attr-defined]
    sys.modules[INTERFACE] = ModuleType(INTERFACE)


def kernels_of(case: dict[str, Any]) -> dict[str, Any]:
    sys.modules.pop(INTERFACE, None)
    if case.pop("wheel", False):
        install()
    model = MODEL | {"drop_rate": 0.0} | {key: case.pop(key) for key in [*case] if key in ModelConfig.model_fields}
    configs = TrainConfig.model_validate(TRAIN | case), ModelConfig.model_validate(model)
    experiment: Any = SimpleNamespace(config=configs[0], model=configs[1], moe_router_loss_scale=0.0)
    found: dict[str, Any] = {}
    try:
        step = steps.build(experiment, World(0, 0, 1, 1, steps.DEVICE))
    except UserError as error:
        return {"refused": str(error)}
    newer.clear()
    microbatch = Microbatch.consecutive(np.zeros(2 * 64 + 1, np.uint16), 64)
    letters: Any = SimpleNamespace(vocab_size=64, eot_token=None)
    for name, work in {
        "train": lambda: step.accumulate([microbatch]),
        "validation": lambda: microbatch_losses(step.bare_model, [microbatch], step.precision),
        "sample": lambda: continue_prompts(step.bare_model, letters, [[1, 2]], 3, GREEDY),
    }.items():
        chosen.clear()
        work()
        found[name] = [*dict.fromkeys(chosen)]
    found["newer"] = [*dict.fromkeys(newer)]
    found["tag"] = torch.compiler.config.cache_key_tag.strip()
    return found | {"recorded": attention_in_use(configs[0].attention, steps.DEVICE)}


def main() -> None:
    F.scaled_dot_product_attention = noted  # type: ignore[assignment]
    for case in json.loads(sys.argv[1]):
        print(json.dumps(kernels_of(case)))


if __name__ == "__main__":
    main()
