"""Evaluation of a finished model in one process: loss on held-out tokens, samples, benchmark scores (`benchmarks/`),
and, after fine-tuning on instructions (`instruct/`), the scores of a judge (`judge/`).
"""
