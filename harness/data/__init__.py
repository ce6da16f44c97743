"""Token datasets: downloaded from the Hub or built here, verified, and read as the microbatches of each rank.
`preparation/` makes datasets from text or token files; `tokenizers.py` converts text to tokens and back.
"""
