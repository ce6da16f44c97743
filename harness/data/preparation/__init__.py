"""Preparation of a token dataset from text, parquet or JSON lines files, a Hub dataset or token files."""
