"""Preparation of a token dataset from files (text, parquet, JSON lines or tokens) or a Hub dataset."""
