"""Token data sets: fetched from the Hub or built, verified, and read as the microbatches that each rank trains on.
`preparation/` makes them of text or of token files; `tokenizers/` turns text into tokens and back.
"""
