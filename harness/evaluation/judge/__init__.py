"""Scores that another language model, the judge, gives to responses: its prompts, the requests to its API, the cache of
its answers, and the comparison of models with confidence intervals.
"""
