"""The ranks of a run: their start, the rendezvous, detection of ranks that are stuck or gone, stopping all ranks
together, and all collectives except those of DistributedDataParallel and training/zero1.py."""
