"""One file per module, and end-to-end ones that run the real commands."""
