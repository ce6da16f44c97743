"""Units that messages and options count in."""

from __future__ import annotations

GIB = 2**30
