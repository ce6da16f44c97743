"""A run directory: what is asked of it (model.json, train.json), what it will do and cost (the plan), and what it has
left (metrics, summary, checkpoints, chart). Reading one needs no process group.
"""
