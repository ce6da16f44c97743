"""A forked process starts in the same state as a process that starts cold, and ends in the same way."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.launch import Workshop
from tests.support.warm import FORK_PYTHONS

PARENT = """
import json, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: None)
held = os.open("/dev/null", os.O_RDONLY)
ends = []
for how in ("number", "words", "error", "killed"):
    command = [sys.executable, "-u", "child.py", how, str(held)]
    done = subprocess.run(command, env={**os.environ, "GIVEN": "x"}, capture_output=True, text=True,
                          start_new_session=True)
    ends.append((done.returncode, done.stdout, done.stderr))
print(json.dumps([os.getpid(), ends]))
"""
CHILD = """
import json, os, signal, sys
is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
try:
    is_closed = not os.fstat(int(sys.argv[2]))
except OSError:
    is_closed = True
found = [os.getppid(), os.getsid(0) == os.getpid(), os.environ["GIVEN"], "torch" in sys.modules, is_default, is_closed]
print(json.dumps(found), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit({"number": 7, "words": "these words"}[sys.argv[1]])
"""


def test_a_forked_python_is_like_one_that_was_started(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)
    stdout, stderr = Workshop(tmp_path).fork([str(tmp_path / "parent.py")], {}, FORK_PYTHONS).communicate(timeout=100)
    assert stderr == ""
    pid, ends = json.loads(stdout)
    assert [status for status, _, _ in ends] == [7, 1, 1, -9]
    assert ends[1][2] == "these words\n"
    assert "KeyError: 'error'" in ends[2][2]
    for _, said, _ in ends:
        assert json.loads(said) == [pid, True, "x", True, True, True]
