"""Decoding inside transformers: an enabled model, its cache and layers, static steps.

The layers give room and say which sequences there are; backends step. May import what lies below, see CONTRIBUTING.md.
"""
