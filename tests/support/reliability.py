"""docs/RELIABILITY.md: the list of faults that tests inject, made from the marks of the tests.

python -m tests.support.reliability > docs/RELIABILITY.md
"""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]
INTRODUCTION = """# Faults survived

Each line is a test. Most inject the fault into the real `ddp_train.py` and compare what is left with an undisturbed
run; most tests of arbitrary content only read the files, as `ddp_train.py` does. "Refused" and "ends" mean: with one
line that says why, and with nothing harmed. "The same end" means: weights, optimizer state, random states and metrics
except times, bit for bit. Numbers, "each" and "every" are those of `uv run pytest -m fault --exhaustive`; without
`--exhaustive`, fewer places are tried. Everything ran on the CPUs of one machine, which stood for several where needed;
bits [on GPUs](continuing.md#what-is-the-same-and-where) were compared in [a few cases](LOG.md).
"""


def faults_of(path: Path) -> list[tuple[str, str]]:
    """Return the name and the outcome of each `@pytest.mark.fault(name, outcome)` in a file, in order."""
    calls = [
        node
        for function in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(function, ast.FunctionDef)
        for node in function.decorator_list
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault"
    ]
    return [(ast.literal_eval(call.args[0]), ast.literal_eval(call.args[1])) for call in calls]


def render(folder: Path = FOLDER) -> str:
    """Return the document. It has a list of faults for each test file, under the first line of the file's docstring."""
    lines = [INTRODUCTION]
    for path in sorted(folder.rglob("test_*.py")):
        if faults := faults_of(path):
            heading = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem
            lines += [f"- {heading.splitlines()[0].rstrip('.')}", *(f"  - **{name}**: {how}" for name, how in faults)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
