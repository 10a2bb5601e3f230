"""Access to the system: files, locks, paths, JSON, functions by name, and regular expressions with a time limit."""
