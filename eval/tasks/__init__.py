"""Tasks to evaluate: samples, and the grading of answers."""
