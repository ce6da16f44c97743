"""Parts that the training loop in ddp_train.py uses: start-up, the optimizer step, losses, evaluations, saving and
reports. Also the microbatch search (ddp_train.py -f) and the measurements of check_machine.py."""
