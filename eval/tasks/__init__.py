"""What can be evaluated: samples, and how an answer is graded."""
