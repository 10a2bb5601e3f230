"""Caches: which columns a forward computes, and which keys and values it reuses. One method, one file."""
