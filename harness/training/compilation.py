"""Compilation that all ranks share: if a model's first pass fails to compile on one rank, none trains compiled code."""

from __future__ import annotations

from typing import Literal

from torch._dynamo.exc import TorchDynamoException

from harness.common.errors import UserError
from harness.common.memory import is_out_of_memory
from harness.data.loader import Microbatch
from harness.distributed.world import World
from harness.model.kernels import explain_nondeterminism, is_compiled, run_eagerly
from harness.training.startup import say
from harness.training.step import OptimizerStep

REASON_CHARACTERS = 200


def settle_compilation(
    step: OptimizerStep, microbatch: Microbatch, setting: bool | Literal["auto"], world: World
) -> None:
    """Compile what `choose_kernels` has marked, by a pass that leaves nothing but random numbers drawn.

    If that fails on any rank, with train.json's `compile` "auto" all ranks go on without, and say so once. With true:
    raises UserError on all of them. Collective, for ranks with the same model.
    """
    if not is_compiled(step.bare_model):
        return
    failure = None
    try:
        step.pass_alone(microbatch)
    except Exception as error:
        is_compilers = isinstance(error, TorchDynamoException)
        if is_out_of_memory(error) or explain_nondeterminism(error) or not is_compilers:
            raise
        failure = _reason(error)
    failures = [each for each in world.gather(failure) if each is not None]
    if not failures:
        return
    if setting is True:
        raise UserError(_cannot_be_compiled(failures[0]))
    run_eagerly(step.bare_model)
    say(world, f"note: the model is not compiled, and trains more slowly: compiling failed: {failures[0]}")


def explain_failed_compilation(error: BaseException) -> str | None:
    """A line for a compiler's error; None for another one."""
    return _cannot_be_compiled(_reason(error)) if isinstance(error, TorchDynamoException) else None


def _cannot_be_compiled(reason: str) -> str:
    return f'train.json: key "compile": the model cannot be compiled here: {reason}; mend that, or let compile be false'


def _reason(error: BaseException) -> str:
    """The first line of a compiler's error that is not torch's own preamble, cut to REASON_CHARACTERS."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.endswith("raised:")] or [type(error).__name__]
    return said[0][:REASON_CHARACTERS]
