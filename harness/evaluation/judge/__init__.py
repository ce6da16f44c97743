"""Scores that another language model gives to responses: its prompt, the requests to its API, the cache of answers, and
the comparison of models with intervals.
"""
