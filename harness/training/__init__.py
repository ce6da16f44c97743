"""Parts that the training loop in ddp_train.py uses: start-up, the optimizer step, losses, evaluations on all ranks,
and reports. No other package of `harness` imports this one."""
