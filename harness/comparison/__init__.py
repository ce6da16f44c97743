"""Comparison of runs, finished or not: records, tables, replicates, verdicts, costs on other machines, charts, page."""
