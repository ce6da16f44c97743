"""Errors of gloo and nccl about failed connections between ranks, turned into errors that a user can act on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from harness.common.errors import PeerError, RunError

# The process at the other end has closed its connection.
PEER_GONE_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection timed out",
    "Broken pipe",
    "No route to host",
    "Host is unreachable",
    "Network is unreachable",
    "remote process exited",
)
TIMED_OUT_TEXT = "Timed out waiting"
NO_FULL_MESH_TEXT = "connectFullMesh failed"  # gloo: a rank could not be reached at the address it gave


@contextmanager
def leaving_with_peers() -> Iterator[None]:
    """Turn the error of an exchange whose other side is gone into PeerError: the rank that failed has the reason."""
    try:
        yield
    except RuntimeError as error:
        if TIMED_OUT_TEXT in str(error):
            raise RunError("another rank did not come to an exchange in time, and none is known to be stuck") from None
        if not any(text in str(error) for text in PEER_GONE_TEXTS):
            raise
        raise PeerError("the connection to another rank is gone") from None


@contextmanager
def explained_addresses() -> Iterator[None]:
    """A machine's name may lead to an address that only itself can use, such as Debian's 127.0.1.1."""
    try:
        yield
    except RuntimeError as error:
        if NO_FULL_MESH_TEXT not in str(error):
            raise
        raise RunError(
            f"a rank cannot be reached at the address that {socket.gethostname()} or another machine gave for itself; "
            "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) on every machine to the interface that they share, as eth0"
        ) from None
