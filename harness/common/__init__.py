"""Base of all other packages: errors, messages, options, strict JSON, atomic writes, locks, processes, devices,
libraries, the Hugging Face Hub, and statistics. It imports no other package of this program."""
