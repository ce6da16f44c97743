"""Everything about a model but its layers, which are in gpt.py at the root: configuration and cost, the fused loss,
precision, the key-value cache, the choice of kernels, and reading and writing weights.
"""
