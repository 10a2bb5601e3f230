"""When a row ends."""
