"""Models compiled without machine code, for tests of the graphs that torch.compile makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpt import GPTModel
from harness.model import cross_entropy
from harness.model.cross_entropy import fused_kernel


def trace(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Set up `model` to be compiled at its next forward pass, and return the list to which that pass adds the graphs.
    The graphs run as they were traced. This is quick, because no machine code is generated."""
    torch._dynamo.reset()
    kernel = torch.compile(fused_kernel, dynamic=False, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(cross_entropy, "_compile", lambda: kernel)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, examples)

    model.compile(backend=backend, dynamic=False)
    return graphs
