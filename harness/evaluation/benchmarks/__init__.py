"""Standard benchmarks of lm-eval: finding and loading tasks, scoring a model of ours, and the table of scores."""
