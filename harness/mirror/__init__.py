"""A run's mirror: a copy of its checkpoints and small files in a store that outlives the machine."""
