"""Tokenizers, which convert text to token ids and back: GPT-2's and other encodings of tiktoken, and byte-level BPEs
trained by this tool.
"""
