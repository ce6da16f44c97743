"""Standard benchmarks of lm-eval: finding and loading tasks, scoring a model, and the table of scores."""
