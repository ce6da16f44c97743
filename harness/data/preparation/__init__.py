"""Preparation of a token dataset from text, parquet or JSON lines files, a Hub dataset or token files. Text is
tokenized, shuffled as the options say, and written as one safetensors file per split, in a work folder from which an
interrupted preparation resumes.
"""
