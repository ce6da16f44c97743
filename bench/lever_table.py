"""The tables of docs/levers.md, of what compare_runs.py and bench/lever_costs.py have found.

uv run compare_runs.py 'levers-*' --baseline levers-plain --json > tokens.json
uv run bench/lever_costs.py sweeps/levers.json --json > costs.json
uv run bench/lever_table.py tokens.json costs.json --seconds seconds.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

HEAD = ["lever", "parameters", "time of a step", "equal tokens: nats", "verdict", "equal seconds: nats", "verdict"]


def verdicts(files: tuple[Path, ...]) -> dict[str, dict[str, Any]]:
    """By lever: the part of an arm's name behind the sweep's."""
    found = {}
    for file in files:
        for each in json.loads(file.read_text())["comparison"]["verdicts"]:
            found[lever(each["arm"])] = each
    return found


def lever(arm: str) -> str:
    return arm.partition("-")[2] or arm


def difference(verdict: dict[str, Any] | None) -> list[str]:
    """The difference with its interval, and the verdict."""
    if verdict is None:
        return ["", ""]
    text = f"{verdict['difference']:+.3f}".replace("-", "−")
    if verdict["interval"] is not None:
        low, high = verdict["interval"]
        text += f" [{low:+.3f}, {high:+.3f}]".replace("-", "−")
    return [text, verdict["verdict"]]


def row(cost: dict[str, Any], tokens: dict[str, Any], seconds: dict[str, Any]) -> list[str]:
    name = lever(cost["name"])
    return [
        f"`{name}`",
        f"{cost['parameters']:,}",
        f"{cost['ratio']:.2f}",
        *difference(tokens.get(name)),
        *difference(seconds.get(name)),
    ]


@click.command()
@click.argument("tokens", type=click.Path(path_type=Path), nargs=-1)
@click.option("--costs", type=click.Path(path_type=Path), required=True)
@click.option("--seconds", type=click.Path(path_type=Path), multiple=True)
def main(tokens: tuple[Path, ...], costs: Path, seconds: tuple[Path, ...]) -> None:
    """Print a Markdown table with a row for each line of COSTS."""
    at_tokens, at_seconds = verdicts(tokens), verdicts(seconds)
    rows = [row(each, at_tokens, at_seconds) for each in json.loads(costs.read_text())]
    for cells in [HEAD, ["---"] * len(HEAD), *rows]:
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
