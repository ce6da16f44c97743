"""Tests: one file for each module, and end-to-end files that run the real commands."""
