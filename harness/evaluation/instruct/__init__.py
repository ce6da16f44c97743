"""Fine-tuning a model on instructions, and its responses to those that it has not seen."""
