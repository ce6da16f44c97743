"""The ranks of a run: their start, the rendezvous, collectives, detection of ranks that are stuck or gone, and stopping
all ranks together. The other collectives are those of DistributedDataParallel and of training/zero1.py."""
