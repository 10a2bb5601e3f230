"""Answers that must have a form: a regular language over tokens, and the choice of tokens that keeps to it."""
