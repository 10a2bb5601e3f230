"""Answers that must have a form: regular languages over tokens, and choices of tokens that keep to them."""
