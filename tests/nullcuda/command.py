"""Run ddp_train.py, or another script, on the null device.

    python -m tests.nullcuda.command RUN DATASETS_DIR [OPTION]...

The device computes no losses, so those of a step are replaced by numbers when they are read for a report, and those of
a validation when they are computed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from harness.evaluation import loss
from harness.training.loss_meter import LossMeter

ROOT = Path(__file__).parents[2]
read_state, compute_losses = LossMeter.state, loss.microbatch_losses


def plausible_state(self: LossMeter) -> list[float]:
    """Return the meter's values with one microbatch of loss 5."""
    values = read_state(self)
    values[LossMeter.SUM], values[LossMeter.COUNT] = 5.0, 1.0
    return values


def plausible_losses(*arguments: Any) -> list[float]:
    """Compute the losses of microbatches, and return as many losses of 5."""
    return [5.0] * len(compute_losses(*arguments))


def main(script: str = "ddp_train.py") -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN asks the hardware itself
    LossMeter.state = plausible_state  # type: ignore[method-assign]
    loss.microbatch_losses = plausible_losses  # type: ignore[assignment]  # before another module imports it
    sys.argv = [str(ROOT / script), *sys.argv[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
