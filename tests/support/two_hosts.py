"""Two hosts simulated by Linux namespaces, connected by a cable that can be cut, for tests of several nodes.

    with two_hosts(tmp_path) as pair:
        pair.first.shop.add_run("r")
        ...
        ends = wait_for(pair.torchrun("r"), timeout=60)

Each host has its own network (a loopback interface, and one end of the cable), a host name, /etc/hosts with both names,
and a disk: the path `<folder>/work` is a different directory on each host. Network, names and mounts exist only inside
the namespaces. One process for each host keeps the host's namespaces alive. They are gone when this process ends,
whatever happens to the tests.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.launch import ROOT, TORCHRUN, Result, Workshop, rank_variables
from tests.support.warm import FORK_PYTHONS, WarmProcess, warm_server

T = TypeVar("T")

ADDRESSES = {"node-a": "10.77.0.1", "node-b": "10.77.0.2"}
INTERFACE = "eth0"
PORT = 29500
# Moves this thread into namespaces of another process. The 0 allows every kind of namespace.
ENTER = """
import ctypes, os
for kind in {kinds}:
    with open(f"/proc/{pid}/ns/{{kind}}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "cannot enter the host's namespace", namespace.name)
"""
# Starts the process that keeps a host's namespaces. It ends with its input, so also if the tests are killed.
HOLD = ["unshare", "--net", "--uts", "--mount", "--propagation=private", "sh", "-c", "echo there; exec cat"]


@dataclass
class Host:
    """One of the two hosts. `shop` is its disk as the tests see it. The host itself sees the disk at `work`."""

    name: str
    shop: Workshop
    work: Path
    holder: subprocess.Popen[str]

    @property
    def address(self) -> str:
        return ADDRESSES[self.name]

    def call(self, *command: str) -> None:
        """Run a command of the system on this host, which must succeed."""
        call(*enter(self.holder, *command))

    def at_home(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, called in a thread inside this host's network. Sockets made there belong to the
        host."""
        results: list[T] = []

        def visit() -> None:
            exec(ENTER.format(kinds=("net",), pid=self.holder.pid), {})
            results.append(work())

        thread = threading.Thread(target=visit)
        thread.start()
        thread.join()
        return results[0]

    def start(self, command: Sequence[str], variables: dict[str, str], prelude: str = "") -> WarmProcess:
        """Start one of the repository's scripts, or torchrun, on this host. `prelude` is Python source that runs in the
        process first."""
        entrance = ENTER.format(kinds=("net", "uts", "mnt"), pid=self.holder.pid) + f"os.chdir({str(self.work)!r})\n"
        prelude = f"{entrance}{FORK_PYTHONS}\n{prelude}"
        environment = self.shop.variables(variables)
        return warm_server().spawn(list(command), self.work, environment, prelude, draws=self.shop.draws)

    def training(self, name: str) -> list[str]:
        """Return the command that trains the run `name`."""
        return [str(ROOT / "ddp_train.py"), name, str(self.work / "datasets"), "--runs-dir", str(self.work / "runs")]

    def workers(self) -> list[int]:
        """Return the pids of the processes that torchrun has started on this host: those whose parent is on this host,
        but whose grandparent is not."""
        parents = {pid: psutil.Process(pid).ppid() for pid in self.processes()}
        return [pid for pid, parent in parents.items() if parent in parents and parents[parent] not in parents]

    def crash(self) -> None:
        """Send SIGKILL to everything that runs on this host."""
        pids = self.processes()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # all stop first, so that none sees another one die
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def processes(self) -> list[int]:
        """Return the pids of all processes on this host except `holder`, which keeps the host's namespaces."""
        network = os.stat(f"/proc/{self.holder.pid}/ns/net").st_ino
        found = []
        for pid in psutil.pids():
            with suppress(OSError):
                if os.stat(f"/proc/{pid}/ns/net").st_ino == network:
                    found.append(pid)
        return [pid for pid in found if pid != self.holder.pid]


@dataclass
class Pair:
    """Both hosts, and the cable between them."""

    first: Host
    second: Host

    @property
    def hosts(self) -> tuple[Host, Host]:
        return self.first, self.second

    def torchrun(self, name: str, *options: str, processes: int = 1, c10d: bool = False) -> list[WarmProcess]:
        """Start the real torchrun on both hosts, to train the run `name` with `processes` forked ranks on each.

        The first host is node 0. With `c10d`, torchrun itself chooses node 0: the host whose name is first in
        alphabetical order.
        """
        meeting = [f"--rdzv-id={secrets.token_hex(4)}", f"--rdzv-endpoint={self.first.address}:{PORT}"]
        started = []
        for rank, host in enumerate(self.hosts):
            place = ["--rdzv-backend=c10d", *meeting]
            if not c10d:
                place = [f"--node-rank={rank}", f"--master-addr={self.first.address}", f"--master-port={PORT}"]
            launcher = [*TORCHRUN, *place, "--nnodes=2", f"--nproc-per-node={processes}", *options]
            started.append(host.start([*launcher, *host.training(name)], {}))
        return started

    def ranks(self, name: str, *options: str, processes: int = 1) -> list[WarmProcess]:
        """Start `processes` ranks on each host as torchrun does, without the seconds that torchrun itself takes.
        `options` are those of ddp_train.py."""
        variables = rank_variables(2 * processes, address=self.first.address, hosts=2)
        hosts = [host for host in self.hosts for _ in range(processes)]
        return [host.start([*host.training(name), *options], own) for host, own in zip(hosts, variables, strict=True)]

    def unplug(self) -> None:
        """Take the cable out, so that both ends lose their carrier."""
        self.second.call("ip", "link", "set", INTERFACE, "down")

    def drop(self) -> None:
        """Lose every packet without an error, as a broken switch does, by sending all to a hardware address that
        neither host has."""
        for host, other in ((self.first, self.second), (self.second, self.first)):
            host.call("ip", "neighbour", "replace", other.address, "lladdr", "02:00:00:00:00:99", "dev", INTERFACE)

    def mend(self) -> None:
        """Undo `unplug` and `drop`."""
        for host in self.hosts:
            host.call("ip", "link", "set", INTERFACE, "up")
            host.call("ip", "neighbour", "flush", "dev", INTERFACE, "nud", "all")


@contextmanager
def two_hosts(folder: Path) -> Iterator[Pair]:
    """Yield both hosts, connected, with their disks in `folder`. Skips the test if this machine does not allow that."""
    if reason := why_not():
        pytest.skip(reason)
    work = folder / "work"
    work.mkdir()
    with ExitStack() as stack:
        holders = [stack.enter_context(held()) for _ in ADDRESSES]
        cable = f"ip link add {INTERFACE} type veth peer name {INTERFACE} netns {holders[1].pid}"
        call(*enter(holders[0], *cable.split()))
        hosts = [
            stack.enter_context(furnished(name, holder, work)) for name, holder in zip(ADDRESSES, holders, strict=True)
        ]
        yield Pair(*hosts)


@cache
def why_not() -> str | None:
    """Return the reason why this machine cannot simulate two hosts, or None if it can."""
    attempts = (
        "ip link add eth0 type veth peer name eth1 && ip link set lo up",
        "hostname elsewhere && mount --bind /tmp /mnt && nsenter --version",
    )
    try:
        for attempt in attempts:
            call(*HOLD[:-1], attempt)
    except FileNotFoundError as error:
        return f"two hosts in namespaces need {error.filename}"
    except subprocess.CalledProcessError as error:
        return f"two hosts in namespaces need root's rights: {error.stderr.strip()}"
    return None


@contextmanager
def held() -> Iterator[subprocess.Popen[str]]:
    """Yield a process with namespaces of its own, which exist as long as the process does."""
    holder = subprocess.Popen(HOLD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "there\n"
        yield holder
    finally:
        holder.stdin.close()
        holder.wait(timeout=20)
        holder.stdout.close()


@contextmanager
def furnished(name: str, holder: subprocess.Popen[str], work: Path) -> Iterator[Host]:
    """Yield a host with a name, an address and a disk, in the namespaces of the process `holder`."""
    disk = work.parent / name
    disk.mkdir()
    names = work.parent / f"{name}-hosts"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {host}\n" for host, ip in ADDRESSES.items()))
    for command in (
        f"hostname {name}",
        f"mount --bind {disk} {work}",
        f"mount --bind {names} /etc/hosts",
        "ip link set lo up",
        f"ip address add {ADDRESSES[name]}/24 dev {INTERFACE}",
        f"ip link set {INTERFACE} up",
    ):
        call(*enter(holder, *command.split()))
    host = Host(name, Workshop(disk), work, holder)
    try:
        yield host
    finally:
        host.crash()


def enter(holder: subprocess.Popen[str], *command: str) -> list[str]:
    """Return the command line that runs `command` in the namespaces of the process `holder`."""
    return ["nsenter", f"--target={holder.pid}", "--net", "--uts", "--mount", *command]


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def wait_for(processes: Sequence[WarmProcess], *, timeout: float) -> list[Result]:
    """Return the processes' results in their order; if one exceeds the timeout, kill all and raise AssertionError."""
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        printed = "\n".join(process.read(".out") + process.read(".err") for process in processes)
        raise AssertionError(f"still running after {timeout:.0f} s:\n{printed}") from None
    return [Result(process.wait(1), process.read(".out"), process.read(".err")) for process in processes]
