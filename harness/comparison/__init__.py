"""Comparison of runs, finished or not: records, table, replicates, verdicts, fits, costs on machines, charts, page."""
