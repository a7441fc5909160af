"""Options that several commands have in common."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["BUDGET_HELP", "MODEL_HELP", "PROJECTIONS", "AsJson", "Force", "Model", "Output", "Quiet"]

MODEL_HELP = "Folder, GGUF file or Hub id of a causal language model; demo is the bundled model."
PROJECTIONS = "Projections made by bpc calibrate: a file or a Hub id, ORG/NAME or ORG/NAME@REVISION."
BUDGET_HELP = "Cached tokens that each step attends to: a share (2% or 0.02) or a number (2048)."

Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Also write the result as JSON to this file.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, neither bars nor lines.")]
