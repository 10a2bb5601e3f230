"""The loop, and what makes its steps: plug-ins checked together, packs read back, steps recorded."""
