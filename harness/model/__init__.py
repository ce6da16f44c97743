"""The parts of a model outside gpt.py: configuration and cost, the fused loss, precision, the key-value cache, the
choice of kernels, export formats, and reading and writing weights."""
