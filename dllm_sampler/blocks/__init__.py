"""Rules that decide where blocks end."""
