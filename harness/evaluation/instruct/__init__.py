"""Fine-tuning of a model on instructions, and its responses to instructions that it was not trained on."""
