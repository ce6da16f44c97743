"""The one file of results: rows that stages add, and conclusions that are drawn from all of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Results:
    """A JSON file with `rows` and `conclusions`; whole at any time. One process at a time writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[Row]:
        return self._read()["rows"]

    def add(self, stage: str, **values: Any) -> None:
        """Add a row, and print it."""
        row = {"stage": stage, **{key: _rounded(value) for key, value in values.items()}}
        print(json.dumps(row), flush=True)
        content = self._read()
        content["rows"].append(row)
        self._write(content)

    def conclude(self, lines: list[str]) -> None:
        """Put the conclusions in the place of earlier ones."""
        self._write(self._read() | {"conclusions": lines})

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"rows": [], "conclusions": []}
        content: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        return content

    def _write(self, content: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(draft, self.path)


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
