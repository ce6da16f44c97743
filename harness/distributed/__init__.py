"""The ranks of a run: the launcher's environment variables, the rendezvous, collectives other than the gradient
exchange, detection of ranks that are stuck or gone, and stopping all ranks together."""
