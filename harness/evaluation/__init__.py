"""Measures of a finished model: loss on held-out tokens, samples, `benchmarks/`, and, after fine-tuning on instructions
(`instruct/`), the opinion of a judge (`judge/`). One process, and a model that no longer changes.
"""
