"""Telling good projections from bad ones: methods compared at the same budget, on tasks that decode."""
