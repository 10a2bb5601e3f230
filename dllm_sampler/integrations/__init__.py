"""Schedulers inside other engines: what decides over a block of tokens here, decides over it there."""
