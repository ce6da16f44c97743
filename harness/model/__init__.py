"""Everything about a model except its layers, which are in gpt.py: configuration and cost, the fused loss, precision,
the key-value cache, the choice of kernels, and reading and writing weights."""
