"""A run directory: the settings in it (model.json, train.json), its budget of tokens, and the files that commands write
into it (metrics, summary, checkpoints, results, chart). Nothing in this package needs a process group.
"""
