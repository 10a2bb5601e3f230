"""Fused Triton kernels, each with a torch reference of the same signature."""
