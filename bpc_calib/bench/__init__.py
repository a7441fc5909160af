"""Speed beside its floors, dense attention and the paper's pipeline: what `bpc bench` runs."""

from bpc_calib.bench.measure import PARTS, Settings, check, run
from bpc_calib.bench.shapes import SHAPES

__all__ = ["PARTS", "SHAPES", "Settings", "check", "run"]
