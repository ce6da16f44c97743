"""Triton source that the compiler writes for an H100 that does not exist. Nothing runs the source."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

GPU = torch.device("cuda", 0)
H100: dict[str, Any] = {
    "type": "cuda",
    "index": 0,
    "multi_processor_count": 132,
    "cc": 90,
    "major": 9,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
}


def lower_to_triton(function: Callable[..., object], *inputs: Tensor) -> str:
    """Return the source of the program that Inductor makes of `function`, which changes its inputs and returns nothing.

    `inputs` give the shapes and dtypes. They are CPU tensors or meta tensors.
    """
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    fakes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with fakes:  # traced on the CPU: on CUDA even fake tensors ask the driver
        arguments = [torch.empty(each.shape, dtype=each.dtype) for each in inputs]
        functional = torch.func.functionalize(function, remove="mutations_and_views")
        graph = make_fx(functional, decomposition_table=select_decomp_table())(*arguments)

    def on_gpu(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return FakeTensor(
            fakes, torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"), GPU
        )

    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": GPU}
        node.meta = {"val": on_gpu(node.meta["val"])} if "val" in node.meta else {}
    graph.recompile()
    examples = [on_gpu(each) for each in arguments]
    with pretended_h100():
        lowering = GraphLowering(graph, example_inputs=examples, shape_env=fakes.shape_env)
        with V.set_graph_handler(lowering), V.set_fake_mode(fakes), V.set_debug_handler(DebugContext()):
            lowering.run(*examples)
            code: Any = lowering.codegen()[0]
    return str(getattr(code, "value", code))


@contextmanager
def pretended_h100() -> Iterator[None]:
    """Make torch and Triton report an H100 inside this context."""
    import torch._inductor.config
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        def get_current_target(self) -> object:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

    known = inspect.signature(DeviceProperties).parameters  # newer versions of torch have more
    properties = DeviceProperties(**{key: value for key, value in H100.items() if key in known})
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "_lazy_init": None,
    }
    with ExitStack() as patches:
        # Only the source is wanted, so no processes that compile are started.
        patches.enter_context(torch._inductor.config.patch(compile_threads=1))
        patches.enter_context(mock.patch.object(driver, "_active", Driver()))
        patches.enter_context(mock.patch.object(DeviceProperties, "create", return_value=properties))
        for name, answer in answers.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
        yield
