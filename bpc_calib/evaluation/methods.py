"""The methods that are compared, by the names that the command line takes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.evaluation import baselines
from bpc_calib.evaluation.forcing import FullLayer
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.layers import SparseLayer
from bpc_calib.runtime.rules import ranking_defaults

__all__ = ["METHODS", "ComparedMethod", "make_cache", "variants"]


@dataclass(frozen=True)
class ComparedMethod:
    """`forced` tokens are attended whatever the ranking says; some methods take no budget."""

    label: str
    layer: type[SparseLayer]
    forced: int = 0
    calibrated: bool = False  # needs an artifact
    takes_budget: bool = True


METHODS = {
    "full": ComparedMethod("full attention", FullLayer, takes_budget=False),
    "oracle": ComparedMethod("exact top-k", baselines.OracleLayer),
    "bpc": ComparedMethod("BPC", BPCLayer, calibrated=True),
    "bpc-online": ComparedMethod("BPC online", BPCLayer),
    "quest": ComparedMethod("Quest, page 16", baselines.QuestLayer),
    "magicpig": ComparedMethod("MagicPIG LSH", baselines.MagicPIGLayer),
    "magicpig-own": ComparedMethod("MagicPIG, own rule", baselines.MagicPIGSamplingLayer, takes_budget=False),
    "signs": ComparedMethod("64 random signs", baselines.SignsLayer),
    "snapkv": ComparedMethod("SnapKV", baselines.SnapKVLayer),
    "pyramidkv": ComparedMethod("PyramidKV", baselines.PyramidKVLayer),
    "window": ComparedMethod("window + sinks", baselines.WindowLayer, forced=5),
    "random": ComparedMethod("random keys", baselines.RandomLayer),
}


def variants(methods: Iterable[str], budgets: Iterable[float | int]) -> list[tuple[str, float | int | None]]:
    """Every method at every budget, which is None for a method that takes none."""
    chosen = list(budgets)
    return [(name, budget) for name in methods for budget in (chosen if METHODS[name].takes_budget else [None])]


def make_cache(
    name: str, config: Any, artifact: ProjectionArtifact | None, budget: float | int | None, **rules: Any
) -> BPCCache:
    """An empty cache that attends as this method does; `rules` are those of `BPCCache`, a budget None is its default.

    The safeguard is BPC's; the other methods choose by their ranking alone. What is forced, and how the scores of a
    group become one, are the same for all: the artifact's method says, where `rules` do not.

    Raises:
        InputError: rules out of range, or a `min_context`: below it there would be nothing to compare.
    """
    if rules.get("min_context"):
        raise InputError("min_context makes short contexts full attention, so methods are not compared with it")
    if name == "full":
        return BPCCache(config, budget=1.0, dense_layers=())
    method, defaults = METHODS[name], ranking_defaults(artifact)
    rules = {"group": defaults["group"], "recent": defaults["recent"]} | rules
    if method.layer is not BPCLayer:
        rules = rules | {"safeguard": 0.0}
    kind: type[BPCCache] = type("ComparedCache", (BPCCache,), {"layer_class": method.layer})
    if budget is not None:
        rules = rules | {"budget": budget}
    return kind(config, artifact if method.calibrated else None, **rules)
