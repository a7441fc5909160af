"""The calibration path: from a model and text to an artifact.

Keys are collected, fitted and written; the work folder and the ranks let that be stopped and shared out. May import
`errors`, `compat`, `method`, `models`, `text` and `backends`.
"""
