"""The CPU backend, compiled by numba: the same signatures as the torch functions, which are its oracles.

Needs the extra `cpu`; nothing here is imported before a step on a CPU is to be served.
"""
