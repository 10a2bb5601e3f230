"""Several rows of each prompt: which of them go on, and which one is the answer."""
