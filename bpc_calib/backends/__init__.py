"""Where a step is computed: plain torch, Triton on a GPU, C++ on a CPU; reached through `dispatch` alone."""
