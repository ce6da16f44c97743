"""Ranks that torchrun restarts ignore what an earlier start left in the store."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]

from harness.common.errors import PeerError, RunError
from harness.distributed import rendezvous
from harness.distributed.rendezvous import agree_on_restart_id, connection_errors_as_peer_errors
from tests.support.launch import PATIENCE_SECONDS, ROOT, Workshop, finish, rank_variables

SIZE = 4

# torch 2.15's error if torchrun is killed while a rank reads from its store
STORE_GONE = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"


def test_a_store_that_is_gone_is_a_lost_peer() -> None:
    with pytest.raises(PeerError), connection_errors_as_peer_errors():
        raise DistNetworkError(STORE_GONE)


def test_an_interface_that_is_not_there_is_one_line(shop: Workshop) -> None:
    shop.add_run()
    result = shop.attempt("--processes", "2", environment={"GLOO_SOCKET_IFNAME": "nowhere0"})
    assert result.status == 2
    assert result.error_lines == [
        "error: GLOO_SOCKET_IFNAME=nowhere0: no such interface, or it has no address; `ip -brief address` lists them"
    ]


def agree(store: HashStore, ranks: range = range(SIZE), timeout: float = 20.0) -> list[str]:
    """Return the restart ids that the given ranks agree on if they start at the same time."""
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: agree_on_restart_id(store, rank, SIZE, timeout), ranks))


def test_every_start_has_an_id_of_its_own() -> None:
    store = HashStore()
    starts = [set(agree(store)) for _ in range(5)]
    assert all(len(ids) == 1 for ids in starts)
    assert len(set.union(*starts)) == 5


@pytest.mark.parametrize("there", [range(2), range(1, SIZE)])
def test_a_start_that_ended_while_its_ranks_met(there: range) -> None:
    """If only some ranks of a start have joined, they raise RunError, and all ranks of the next start still agree on
    one id."""
    store = HashStore()
    with pytest.raises(RunError, match=r"rank [02] has not answered in time"):
        agree(store, there, timeout=0.3)
    assert len(set(agree(store))) == 1


def test_a_port_that_another_process_has_is_one_line(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.add_dataset()
    shop.add_run()
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        command = [str(ROOT / "ddp_train.py"), "r", str(shop.datasets), "--runs-dir", str(shop.runs)]
        rank = shop.fork(command, rank_variables(2)[0] | {"MASTER_PORT": port})
        result = finish([rank], expect=1, timeout=PATIENCE_SECONDS)
    assert result.stderr == f"error: MASTER_PORT {port}: taken by another process; give another port\n"


@pytest.mark.parametrize(
    ("rank", "message"), [(0, "not all ranks have joined in time"), (1, "rank 0 does not answer at MASTER_ADDR 127")]
)
def test_ranks_that_do_not_meet_are_one_line(monkeypatch: pytest.MonkeyPatch, rank: int, message: str) -> None:
    for name, value in rank_variables(2)[rank].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=message):
        rendezvous._open_store(timedelta(seconds=0.5))
