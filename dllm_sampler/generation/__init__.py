"""From token ids to results: one batch, or any number of prompts in flight."""
