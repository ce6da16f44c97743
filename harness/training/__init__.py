"""The parts that the loop in ddp_train.py drives: start-up, the optimizer step, losses, evaluations on all ranks, and
the report. It may import every package; none imports it.
"""
