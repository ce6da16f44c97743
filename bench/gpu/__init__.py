"""The stages of bench/on_gpu.py. Each stage runs in its own process."""
