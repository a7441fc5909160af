"""Triton kernels: from a query and a cache of codes to attention in a handful of launches (docs/kernels.md).

Each file holds one step; `pipeline` strings them together behind the signatures of the torch functions that are
their oracles. They run on GPUs, and with `TRITON_INTERPRET=1` on a CPU, slowly, for tests.
"""
