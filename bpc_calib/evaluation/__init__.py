"""Telling good projections from bad ones: methods compared at the same budget, on tasks that decode.

Holds tasks, the other methods, and figures. May import `errors`, `compat`, `method`, `models`, `text`, `backends` and
`runtime`.
"""
