"""The CPU backend, compiled by numba (docs/cpu.md).

Needs the extra `cpu`; `dispatch` imports it for the first step on a CPU.
"""
