"""Sweeps: runs derived from a base, their plan and their execution."""
