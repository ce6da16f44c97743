"""A mirror on a real SSH server, of another implementation than the client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest

from tests.mirror.test_two_machines import SETTINGS, STOP, add_machine
from tests.support.launch import Workshop
from tests.support.same_end import assert_same_end


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Yield the URL of a server that knows one user's key. It keeps its files in "store", and "home" is the home
    folder of the user."""
    keys, store = tmp_path / "home" / ".ssh", tmp_path / "store"
    keys.mkdir(parents=True, mode=0o700)
    store.mkdir()
    user, host = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    user.write_private_key(str(keys / "id_ed25519"))
    user.write_public_key(str(keys / "authorized"))
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def listen() -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[host],
            authorized_client_keys=str(keys / "authorized"),
            sftp_factory=lambda connection: asyncssh.SFTPServer(connection, chroot=str(store).encode()),
        )

    acceptor = asyncio.run_coroutine_threadsafe(listen(), loop).result()
    address = f"127.0.0.1:{acceptor.get_port()}"
    (keys / "known_hosts").write_text(f"[{address.replace(':', ']:')} {host.export_public_key().decode()}")
    yield f"sftp://me@{address}/runs"
    loop.call_soon_threadsafe(acceptor.close)
    loop.call_soon_threadsafe(loop.stop)


@pytest.mark.slow
def test_two_machines_on_sftp(tmp_path: Path, server: str) -> None:
    shops = [Workshop(tmp_path / name, environment={"HOME": str(tmp_path / "home")}) for name in ("first", "second")]
    for shop, settings in zip(shops, (STOP, {}), strict=True):
        shop.add_dataset()
        shop.add_run("r", **SETTINGS | {"mirror": server, "keep_checkpoints": 1} | settings)
    first, second = shops
    first.train(ranks=1)
    assert "is from the mirror" in second.train(ranks=1).stdout
    straight = add_machine(tmp_path, "straight", mirror=None)
    straight.train_here()
    assert_same_end(straight.runs / "r", second.runs / "r")
    sent = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert [path.name for path in sent if path.name.endswith(".partial") or path.name == "owner.json"] == []

    (tmp_path / "home" / ".ssh" / "known_hosts").write_text("")
    refused = second.attempt()
    assert refused.status == 2
    assert "is not in ~/.ssh/known_hosts; connect once by ssh" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
