"""The values that travel through a step, the contracts of plug-ins, and what both are made of."""
