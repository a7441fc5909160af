"""The projections that a benchmark decodes with: from a file, or calibrated before it starts."""

from pathlib import Path
from typing import Any

from bpc_artifacts import ProjectionArtifact, load
from bpc_calib import calibrate, describe, make_plan

__all__ = ["projections"]


def projections(path: Path | None, model: Any, tokenizer: Any, corpora: list[str], **plan: Any) -> ProjectionArtifact:
    """The artifact at `path`; without a path, one calibrated on the corpora with the settings of `plan`."""
    if path is not None:
        return load(path)
    return calibrate(model, tokenizer, corpora, make_plan(describe(model.config), **plan))
