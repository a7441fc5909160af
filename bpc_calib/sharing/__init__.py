"""Sharing artifacts on the Hub: the model card, and the upload.

Writes what a stranger reads first. May import `errors`, `hub`, `method` and `evaluation`.
"""
