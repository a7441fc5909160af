"""The options of the commands that decode: projections, attended tokens, sampling."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from bpc_cli.console import fail
from bpc_cli.options import BUDGET_HELP, PROJECTIONS
from bpc_cli.parsing import parse_budget, parse_layers

__all__ = ["ONLINE", "Artifact", "CacheOptions", "SamplingOptions", "System"]

ONLINE = "online"

Artifact = Annotated[
    str, typer.Option("--artifact", "-a", help=f"{PROJECTIONS} {ONLINE} finds projections in the prompt instead.")
]
System = Annotated[
    str | None, typer.Option("--system", help="System message: what the model is told before the first message.")
]


@dataclass(frozen=True)
class CacheOptions:
    """Which tokens each step attends to: the settings of `bpc_calib.BPCCache`."""

    budget: Annotated[str, typer.Option(help=BUDGET_HELP, metavar="SHARE|TOKENS")] = "2%"
    min_tokens: Annotated[int, typer.Option(help="Attend to at least this many tokens.")] = 128
    min_context: Annotated[
        int,
        typer.Option(
            help="Attend to all tokens while the context is shorter than this; bpc bench --crossover finds the value."
        ),
    ] = 0
    dense_layers: Annotated[
        str, typer.Option(help="Layers that attend to all tokens, such as 0,1; or none.", metavar="LAYERS")
    ] = "0,1"

    def rules(self) -> dict[str, Any]:
        """The arguments of `BPCCache`."""
        return {
            "budget": parse_budget(self.budget),
            "min_tokens": self.min_tokens,
            "min_context": self.min_context,
            "dense_layers": parse_layers(self.dense_layers),
        }


@dataclass(frozen=True)
class SamplingOptions:
    """How new tokens are picked, and how many."""

    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many new tokens.", min=1)] = 256
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 picks the most likely token.")] = 0.0
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample only from the most likely tokens that together have this probability, such as 0.9; "
            "without it the model's own setting holds.",
            show_default=False,
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed of sampling and of online projections.", min=0)] = 0

    def arguments(self) -> dict[str, Any]:
        """The arguments of `model.generate`, checked."""
        if self.temperature and not (math.isfinite(self.temperature) and self.temperature >= 0.01):
            fail(f"--temperature {self.temperature}: expected 0, or a number of at least 0.01")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            fail(f"--top-p {self.top_p}: expected a probability above 0 and at most 1")
        if not self.temperature:
            if self.top_p is not None:
                fail("--top-p changes only sampling: give --temperature too, such as --temperature 0.7")
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature} | ({"top_p": self.top_p} if self.top_p else {})
