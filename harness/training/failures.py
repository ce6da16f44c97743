"""Failures of the work on a device, explained to the user in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from harness.common.errors import EXIT, PeerError, RunError, RunStopped, UserError
from harness.common.memory import is_out_of_memory
from harness.distributed.rendezvous import connection_errors_as_peer_errors
from harness.distributed.signals import StopRequest
from harness.model.kernels import explain_failed_kernel


@contextmanager
def explained_failures(microbatch_size: int, stop: StopRequest) -> Iterator[None]:
    """Context manager that turns failures of a device or of another rank into errors of one line:

    - RunError: memory has run out, or another rank does not answer.
    - UserError: an attention kernel has failed, or `deterministic` does not allow an operation.
    - PeerError: another rank has failed or is gone.
    - RunStopped, instead of PeerError: a signal has asked this rank to stop.
    """
    try:
        with connection_errors_as_peer_errors():
            yield
    except PeerError:
        if stop.signal:  # torchrun has already asked this rank to stop
            EXIT.has_lost_peer = True
            raise RunStopped(stop.signal) from None
        raise
    except (RuntimeError, MemoryError, OSError, ImportError) as error:
        # not for an OSError, whose text may hold any path
        if isinstance(error, RuntimeError) and (explained := explain_failed_kernel(error)):
            raise UserError(explained) from None
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else "out of memory"
        remedy = (
            "lower it (ddp_train.py -f finds the largest that fits); to keep the global batch, raise "
            "gradient_accumulation_steps, if neither global_batch_size nor batch_ramp is set"
            if microbatch_size > 1
            else "set activation_checkpointing, or make the model or its context_length smaller"
        )
        raise RunError(
            f"out of memory with microbatch_size {microbatch_size} in train.json ({reason}); {remedy}"
        ) from None
