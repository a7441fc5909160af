"""The plugin for vLLM, which pins one version of it.

Hands pages, codes and block tables of vLLM to a backend. May import `errors`, `method`, `models` and `backends`.
"""
