"""A run directory: its settings (model.json, train.json), and the files that commands write into it (metrics, summary,
checkpoints, results, chart). Nothing in this package needs a process group."""
