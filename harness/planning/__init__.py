"""The plan of a run before it starts, and its cost: experiment, rates, throughput, machines."""
