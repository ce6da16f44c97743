"""An undisturbed run of twelve steps. Runs that are stopped, killed or slowed must reach the same end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.launch import Workshop

FAULTS = "from tests.support.faults import *\n"
STEPS = 12
SETTINGS: dict[str, Any] = {
    "min_train_tokens": STEPS * 128,
    "validation_interval": 3,
    "report_interval": 1,
    "learning_rate": 0.01,
    "clipping_max_norm": 0.5,
}


def build_straight_run(path: Path) -> Workshop:
    """Train the run "straight" on two ranks, and return its workshop. Test modules share the workshop, so each must
    give its runs names of its own."""
    shop = Workshop(path)
    shop.add_dataset(tokens=40_000)
    shop.add_run("straight", **SETTINGS)
    shop.train("straight", prelude=FAULTS)
    return shop
