"""Comparison of finished and running runs: records, columns, replicates, noise, verdicts, charts and the page."""
