"""A run directory: the settings in it (model.json, train.json), its budget of tokens, the files that commands write
into it (metrics, summary, checkpoints, results, chart), and figures that others have published for it; also the
command and the messages at the end of its training. Nothing in this package needs a process group.
"""
