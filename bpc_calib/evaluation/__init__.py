"""Telling good projections from bad ones: methods compared at the same budget, on tasks that decode."""

from bpc_calib.evaluation.evaluate import HARD, TEXT, check, evaluate
from bpc_calib.evaluation.fidelity import measure
from bpc_calib.evaluation.methods import METHODS, make_cache

__all__ = ["HARD", "METHODS", "TEXT", "check", "evaluate", "make_cache", "measure"]
