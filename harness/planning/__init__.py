"""Planning of a run before it starts: its steps, its learning rates, its speed, and its cost on a machine."""
