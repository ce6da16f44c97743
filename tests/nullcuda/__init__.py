"""A CUDA device that computes nothing, and training on it.

A driver and a runtime written in C replace NVIDIA's. They count memory, launches, copies and waits, and run no kernel.
All the rest is real: torch's allocator and its errors, compilation by Inductor and Triton, DDP's buckets (in a process
group that exchanges nothing), `-f`, start-up and checkpoints. Losses and times mean nothing. NCCL and cuDNN are not
there.
"""
