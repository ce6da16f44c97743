"""The ranks of a run: their start, the rendezvous, collectives, detection of ranks that are stuck or gone, and stopping
all ranks together. Gradients and a sharded optimizer's state are exchanged elsewhere, by DistributedDataParallel and in
training/zero1.py."""
