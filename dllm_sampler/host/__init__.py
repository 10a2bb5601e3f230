"""The world outside: files, locks, YAML and JSON, functions by name, regular expressions with a time limit."""
