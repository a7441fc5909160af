"""The CPU backend, in C++ (docs/cpu.md).

Needs the library that setup.py builds; `dispatch` imports it for the first step on a CPU.
"""
