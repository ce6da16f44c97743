"""A GPT apart from its layers, which are in gpt.py at the root: its configuration and cost, the fused loss, precision,
generation with a cache, kernels, and weights under their public names.
"""
