"""The base of all other packages: errors reported in one line, strict JSON, files and folders that appear whole, locks,
the processes of this machine, a device and its memory, downloads, and small statistics. It knows nothing of models,
data sets or runs, and imports no other package.
"""
