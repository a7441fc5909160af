"""Runs Triton's kernels from their PTX, without a GPU."""
