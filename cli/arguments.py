"""What several commands read from their words: dtypes, devices, artifacts, budgets, layers."""

import enum
import os
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from bpc_cli.console import fail

__all__ = [
    "AsJson",
    "Device",
    "Dtype",
    "Model",
    "NoProgress",
    "Revision",
    "TrustRemoteCode",
    "WeightsDtype",
    "find_artifact",
    "parse_budget",
    "parse_layers",
    "pick_device",
    "split",
]


class Dtype(str, enum.Enum):
    """Of the model's weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Model = Annotated[str, typer.Option("--model", "-m", help="Folder or Hub id of a causal language model, or demo.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the model on the Hub.")]
WeightsDtype = Annotated[Dtype, typer.Option(help="Dtype to run the model in.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
NoProgress = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]


def pick_device(name: str) -> str:
    """A device that works here; "auto" is a GPU if there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        float(torch.zeros(1, device=name))
    except Exception as fault:
        reason = str(fault).strip().splitlines()[0]
        fail(f"device {name} cannot be used: {reason}")
    return name


def find_artifact(name: str, revision: str | None = None) -> tuple[Path, str | None]:
    """The file of a path or of a Hub id, and the Hub commit (None for a path)."""
    path = Path(os.path.expanduser(name))
    parts = name.split("/")
    if os.path.exists(path) or len(parts) < 2 or not all(parts) or parts[0] in (".", "..", "~"):
        return path, None
    if len(parts) == 2 and name.endswith(".safetensors"):  # FOLDER/FILE, mistyped
        return path, None
    from bpc_calib.hub import fetch_artifact

    return fetch_artifact(name, revision)


def split(text: str) -> list[str]:
    """`a, b` is a and b, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def parse_budget(text: str, option: str = "--budget") -> float | int:
    """`2%` and `0.02` are a share of the tokens, `2048` is a number of them."""
    try:
        if text.endswith("%"):
            return float(Decimal(text[:-1]) / 100)
        return int(text) if text.lstrip("+-").isdecimal() else float(Decimal(text))
    except (ArithmeticError, ValueError):
        fail(f"{option} {text}: expected a share of the tokens (2% or 0.02) or a number of tokens (2048)")


def parse_layers(text: str) -> tuple[int, ...]:
    """`0,1` names layers, `none` none."""
    if text.strip() in ("", "none"):
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        fail(f"--dense-layers {text}: expected layers like 0,1 or none")
