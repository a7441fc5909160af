"""The options of `bpc bench` that say what is measured."""

from dataclasses import dataclass
from typing import Annotated

import typer

from bpc_calib.bench.settings import DECODE_LENGTHS, LENGTHS, PARTS, PREFILL_TOKENS, Settings
from bpc_cli.options import BUDGET_HELP
from bpc_cli.parsing import parse_budgets, parse_counts, parse_layers, split

__all__ = ["MeasureOptions"]


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured; None leaves it to the model or the machine."""

    parts: Annotated[
        str | None,
        typer.Option(
            help=f"Parts to measure: {', '.join(PARTS)}. Default: all.", metavar="PART,...", show_default=False
        ),
    ] = None
    crossover: Annotated[
        bool,
        typer.Option(
            "--crossover", help="Instead of the parts, find the context length from which BPC is faster than dense."
        ),
    ] = False
    lengths: Annotated[
        str | None,
        typer.Option(
            help=f"Tokens cached. Default: {_listed(LENGTHS)} for the layer, {_listed(DECODE_LENGTHS['cpu'])} for "
            f"decoding (on a GPU {_listed(DECODE_LENGTHS['cuda'])}). --crossover doubles the length up to the longest.",
            metavar="TOKENS,...",
            show_default=False,
        ),
    ] = None
    batch_sizes: Annotated[str, typer.Option(help="Sequences decoded at once.", metavar="NUMBER,...")] = "1"
    budgets: Annotated[str, typer.Option(help=BUDGET_HELP, metavar="SHARE|TOKENS,...")] = "2%"
    group_sizes: Annotated[
        str | None,
        typer.Option(
            help="Query heads per KV head in the layer part. Default: the model's.",
            metavar="NUMBER,...",
            show_default=False,
        ),
    ] = None
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads in the layer part. Default: the model's.", show_default=False)
    ] = None
    head_dim: Annotated[
        int | None,
        typer.Option(help="Head dimension in the layer part. Default: the model's.", show_default=False),
    ] = None
    dense_layers: Annotated[
        str,
        typer.Option(
            help="Layers that attend to all tokens, such as 0,1 (the default of BPCCache); or none.", metavar="LAYERS"
        ),
    ] = "none"
    prefill_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of the prefill. Default: {PREFILL_TOKENS['cpu']}, on a GPU {PREFILL_TOKENS['cuda']}.",
            show_default=False,
        ),
    ] = None
    repeats: Annotated[int, typer.Option(help="Number of measurements; the tables show their medians.")] = 7

    def settings(self) -> Settings:
        """The same options, parsed."""
        return Settings(
            parts=PARTS if self.parts is None else tuple(split(self.parts)),
            crossover=self.crossover,
            lengths=None if self.lengths is None else parse_counts(self.lengths, "--lengths"),
            batch_sizes=parse_counts(self.batch_sizes, "--batch-sizes"),
            budgets=parse_budgets(self.budgets),
            group_sizes=None if self.group_sizes is None else parse_counts(self.group_sizes, "--group-sizes"),
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dense_layers=parse_layers(self.dense_layers),
            prefill_tokens=self.prefill_tokens,
            repeats=self.repeats,
        )
