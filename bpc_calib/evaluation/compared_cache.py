"""The cache of a compared method."""

from importlib import import_module
from typing import Any

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.evaluation.methods import BPC_LAYER, METHODS
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.runtime.rules import ranking_defaults

__all__ = ["make_cache"]


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
    if method.layer != BPC_LAYER:
        rules = rules | {"safeguard": 0.0}
    module, _, layer = method.layer.rpartition(".")
    layer_class = getattr(import_module(module), layer)
    kind: type[BPCCache] = type("ComparedCache", (BPCCache,), {"layer_class": layer_class})
    if budget is not None:
        rules = rules | {"budget": budget}
    return kind(config, artifact if method.calibrated else None, **rules)
