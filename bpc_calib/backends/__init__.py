"""Where a step is computed: plain torch, Triton on a GPU, C++ on a CPU; each has the eight functions of `protocol`.

`dispatch.find` picks one. May import `errors`, `compat` and `method`; others see `dispatch`, `limits`, `pages` alone.
"""
