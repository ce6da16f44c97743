"""Random states: alike on all ranks while the model is made, different and restorable while it trains."""

from __future__ import annotations

from typing import Any

import torch

# Keeps the streams of neighbouring ranks and seeds apart: rank 1 of seed 42 is not rank 0 of seed 43.
RANK_STRIDE = 1_000_003


def seed_alike(seed: int) -> None:
    """The state in which every rank draws the same initial weights."""
    torch.manual_seed(seed)


def seed_for_rank(seed: int, rank: int, step: int = 0) -> None:
    """A state of this rank's own, for dropout, from global `step` on."""
    torch.manual_seed((seed + (rank + 1) * RANK_STRIDE + step * RANK_STRIDE**2) % 2**63)


def random_state(device: torch.device) -> dict[str, Any]:
    """This process's random state."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
