"""Triton kernels: from a query and a cache of codes to attention in a few launches (docs/kernels.md).

Each file holds one step; `pipeline` launches them in order, with the signatures of the plain torch functions. They run
on GPUs, and with `TRITON_INTERPRET=1` on a CPU, slowly, for tests.
"""
