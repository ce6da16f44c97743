"""A run directory: the settings in it (model.json, train.json), its budget of tokens, the files that commands write
into it (metrics, summary, checkpoints, results, chart), and figures that others have published for it; also the
messages about the start and the end of its training, and the command that runs at the end. Nothing in this package
needs a process group.
"""
