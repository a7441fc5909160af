"""What each KV head gets of a budget, and what is lost by it: numbers and tables, for artifacts that know the needs."""

import math
from typing import TYPE_CHECKING, NamedTuple

from bpc_calib.method.defaults import budget_text
from bpc_cli.console import TextTable, print_text_table

if TYPE_CHECKING:
    from bpc_artifacts import ProjectionArtifact

BUDGETS = (0.005, 0.01, 0.02, 0.05, 0.1)  # for which losses are shown
BLOCKS = "▁▂▃▄▅▆▇█"  # a head at the budget has the fourth
LOSSES = (
    "A loss is the KL of the next token, measured with one sparse layer at a time and split among its heads. "
    "With all layers sparse at once, expect more than this sum."
)


class SharedOut(NamedTuple):
    """How an artifact shares a budget out."""

    budget: float
    by_head: dict[int, list[float]]  # by layer, the share of the tokens of a long context that each KV head attends to
    by_head_short: dict[int, list[float]] | None  # the same at 2,048 tokens, where that has needs of its own
    losses: list[tuple[float, float, float]]  # a budget, and the sum of the heads' losses: by need, with equal shares


def shared_out(artifact: "ProjectionArtifact", budget: float) -> SharedOut | None:
    """How an artifact shares out this budget, a share of the tokens; None: it does not know what each head needs."""
    import numpy as np

    from bpc_calib.method.shares import LONG, SHORT, loss, share_out, shares_at

    needs, short = artifact.by_layer("need"), artifact.by_layer("need_short")
    if not needs:
        return None
    shares, losses = share_out(needs, short or None), []
    for each in sorted({*BUDGETS, budget}):
        equal = {layer: np.full(len(need), each) for layer, need in needs.items()}
        losses.append((each, loss(needs, shares_at(shares, each)), loss(needs, equal)))

    def by_head(tokens: int) -> dict[int, list[float]]:
        return {layer: found.tolist() for layer, found in shares_at(shares, budget, tokens).items()}

    return SharedOut(budget, by_head(LONG), by_head(SHORT) if short else None, losses)


def print_shares(found: SharedOut, most_heads: int) -> None:
    """Print both tables, and what they show."""
    table = share_table(found, most_heads)
    print_text_table(table)
    if "heads" in table.columns:
        print(
            f"One block per head: {BLOCKS[3]} is the budget, each step up twice and each step down half as many tokens."
        )
    print_text_table(loss_table(found))
    print(losses_note(found))


def losses_note(found: SharedOut) -> str:
    """What the tables show."""
    from bpc_calib.method.shares import LONG_FROM

    if found.by_head_short is None:
        return LOSSES
    return f"{LOSSES} Contexts below {LONG_FROM:,} tokens have shares of their own, which --json shows."


def share_table(found: SharedOut, most_heads: int | None = None) -> TextTable:
    """The share of every head in %; of more than `most_heads` (None: any number) the least and most, and blocks."""
    heads = len(next(iter(found.by_head.values())))
    each_head = most_heads is None or heads <= most_heads
    names = tuple(f"head {head}" for head in range(heads)) if each_head else ("min", "max", "heads")
    rows = []
    for layer, shares in found.by_head.items():
        cells = [sum(shares) / heads, *(shares if each_head else (min(shares), max(shares)))]
        blocks = [] if each_head else ["".join(_block(share / found.budget) for share in shares)]
        rows.append((str(layer), *(f"{100 * cell:.2f}" for cell in cells), *blocks))
    title = f"Tokens that each KV head attends to at a budget of {budget_text(found.budget)}, in %"
    return TextTable(title, ("layer", "mean", *names), rows)


def loss_table(found: SharedOut) -> TextTable:
    """The sum of the heads' losses by budget."""
    rows = [(budget_text(budget), f"{by_need:.4f}", f"{equal:.4f}") for budget, by_need, equal in found.losses]
    return TextTable("Sum of what the heads lose", ("budget", "shares by head", "equal shares"), rows)


def _block(ratio: float) -> str:
    return BLOCKS[min(max(round(math.log2(ratio)) + 3, 0), len(BLOCKS) - 1)]
