"""From what a user types to token ids: prompts, chat messages, infill templates, given tokens."""
