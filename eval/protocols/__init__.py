"""Published evaluation protocols: their prompts, grading and figures."""
