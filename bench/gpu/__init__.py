"""The stages of bench/on_gpu.py, each a process of its own."""
