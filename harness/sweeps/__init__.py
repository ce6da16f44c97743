"""Sweeps: runs derived from a base, their plan, their execution, and searches."""
