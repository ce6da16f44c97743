"""The one file of results: rows that stages add, and the same as tables in Markdown beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Results:
    """A JSON file with `rows`; whole at any time. One process at a time writes to it."""

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

    def write_tables(self) -> Path:
        """Write all rows into a Markdown file beside the JSON file: a table for each stage."""
        lines = ["# Measured by bench/on_gpu.py"]
        rows = self.rows()
        for stage in dict.fromkeys(row["stage"] for row in rows):
            own = [row for row in rows if row["stage"] == stage]
            keys = [key for key in dict.fromkeys(key for row in own for key in row) if key != "stage"]
            lines += ["", f"## {stage}", "", f"| {' | '.join(keys)} |", f"|{'---|' * len(keys)}"]
            lines += [f"| {' | '.join(_cell(row.get(key)) for key in keys)} |" for row in own]
        path = self.path.with_suffix(".md")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"rows": []}
        content: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        return content

    def _write(self, content: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(draft, self.path)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    text = f"{value:,}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value or "")
    return " ".join(text.replace("|", "\\|").split())


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
