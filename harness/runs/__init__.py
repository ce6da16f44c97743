"""A run directory: the settings in it (model.json, train.json), its budget of tokens, and the files that commands write
into it (metrics, summary, checkpoints, results, chart). Reading these files needs no process group.
"""
