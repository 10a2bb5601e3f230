"""Random configurations, bad inputs and killed processes: what must never happen is looked for (docs/fuzzing.md)."""
