"""An optimizer's state by parameter name: what checkpoints hold, however parameters are grouped and shared out."""

from __future__ import annotations

import torch
from torch import Tensor

# By parameter name, then by the optimizer's own word for it ("exp_avg"): tensors, or their shapes.
NamedState = dict[str, dict[str, Tensor]]
StateShapes = dict[str, dict[str, torch.Size]]


def check_state(saved: NamedState, shapes: StateShapes) -> None:
    """Raises ValueError if a state is not one of just these parameters and shapes, in fp32: fused kernels would read
    beyond it."""
    if saved.keys() != shapes.keys():
        raise ValueError("the parameters are others than the model's")
    for name, wanted in shapes.items():
        state = saved[name]
        if state.keys() != wanted.keys():
            raise ValueError(f"{name} has {sorted(state)}")
        for key, shape in wanted.items():
            if state[key].shape != shape or state[key].dtype != torch.float32:
                raise ValueError(f"{key} of {name} is {state[key].dtype} {list(state[key].shape)}")
