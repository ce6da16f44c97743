"""Base of all other packages: one-line errors and messages, options of commands, strict JSON, atomic writes of files
and folders, locks, processes of this machine, devices and their memory, imports and versions of libraries, the Hugging
Face Hub, and simple statistics. It imports no other package of this program.
"""
