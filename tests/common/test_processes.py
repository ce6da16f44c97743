"""Liveness of a process, and the process that a pid and a time of start mean."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from harness.common.processes import ProcessName, is_alive, start_time


def test_a_process_that_has_ended_is_gone_before_its_parent_asks() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    assert is_alive(child.pid)
    assert start_time(child.pid).isdigit()
    child.stdin.close()
    deadline = time.monotonic() + 30
    while is_alive(child.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert child.returncode is None
    assert os.path.exists(f"/proc/{child.pid}")
    assert start_time(child.pid) == ""
    assert replace(ProcessName.own(), pid=child.pid).is_gone()
    child.wait()
    assert not is_alive(child.pid)
    assert start_time(child.pid) == ""


@pytest.mark.parametrize("pid", [2**22 + 1, 2**70], ids=["beyond the system's largest", "beyond any number of a pid"])
def test_a_number_that_no_process_has(pid: int) -> None:
    assert not is_alive(pid)
    assert start_time(pid) == ""


def test_this_process() -> None:
    assert is_alive(os.getpid())
    assert start_time(os.getpid()) == start_time(os.getpid()) != ""
    own = ProcessName.own()
    assert not own.is_gone()
    assert own.is_neighbour_of(replace(own, pid=1))
    assert not own.is_neighbour_of(replace(own, host=f"{own.host}x"))
    assert not own.is_neighbour_of(replace(own, namespace=f"{own.namespace}x"))
    assert str(own) == f"{own.host}, pid {os.getpid()}"
