"""Base of all other packages: one-line errors and messages, options of commands, strict JSON, atomic writes of files
and folders, locks, processes of this machine, devices and their memory, imports of large libraries, the Hugging Face
Hub, and simple statistics. It has no code for models, datasets or runs, and imports no other package.
"""
