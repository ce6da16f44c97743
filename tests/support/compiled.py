"""Models that are compiled for what compiling does to them, without machine code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpt import GPTModel
from harness.model import cross_entropy
from harness.model.cross_entropy import fused_kernel


def trace(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Have a model compiled at its next pass; the programs that it is then cut into are added to the list. They run as
    they were traced: quick, since no machine code is made of them."""
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
