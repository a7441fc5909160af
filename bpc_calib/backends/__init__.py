"""Where a step is computed: plain torch, Triton on a GPU, numba on a CPU; reached through `dispatch` alone."""
