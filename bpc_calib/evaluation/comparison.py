"""What `evaluate` compares, checked before any work, and the cache of each method."""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from importlib import import_module
from typing import Any

from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.evaluation.learning import Learned, Learner, learn
from bpc_calib.evaluation.methods import BPC_LAYER, Variant, method_of
from bpc_calib.evaluation.settings import FORCED, HARD, Comparison, check_settings, computable
from bpc_calib.evaluation.tasks import TEXT
from bpc_calib.method.rules import default_dense_layers, ranking_defaults
from bpc_calib.models.description import describe
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.runtime.layers import SparseLayer

__all__ = [
    "FORCED",
    "HARD",
    "Comparison",
    "check",
    "layer_class_of",
    "learn_methods",
    "learners",
    "make_cache",
    "settled",
]

logger = logging.getLogger("bpc_calib")


def make_cache(
    name: str,
    config: Any,
    artifact: ProjectionArtifact | None,
    budget: float | int | None,
    learned: Learned | None = None,
    **rules: Any,
) -> BPCCache:
    """An empty cache that attends as this method does.

    The safeguard is BPC's; the other methods choose by their ranking alone. What is forced, which layers are dense, and
    how the scores of a group become one, are the same for all: the artifact says, where `rules` do not. Where it has
    the needs of the KV heads, `bpc`, `twilight` and `oracle` share the budget by these; the others give every head the
    mean.

    Args:
        name: of a method, as `method_of` knows it.
        config: `model.config`.
        artifact: projections of the model, which calibrated methods need.
        budget: share of the tokens in (0, 1], or a number of tokens; None: the default of `BPCCache`.
        learned: what the method has learned from text, if it does (`learn`).
        rules: other arguments of `BPCCache`.

    Raises:
        InputError: rules out of range, or a `min_context`: below it there would be nothing to compare.
    """
    if rules.get("min_context"):
        raise InputError("min_context makes short contexts full attention, so methods are not compared with it")
    rules["min_context"] = 0
    if name == "full":
        return BPCCache(config, budget=1.0, dense_layers=())
    method, defaults = method_of(name), ranking_defaults(artifact)
    rules = {"group": defaults["group"], "recent": defaults["recent"]} | settled(config, artifact, rules)
    if method.layer != BPC_LAYER:
        rules = rules | {"safeguard": 0.0}
    layer_class = layer_class_of(name)
    if learned is not None:
        layer_class = type(layer_class.__name__, (layer_class,), {"learned": learned})
    kind: type[BPCCache] = type("ComparedCache", (BPCCache,), {"layer_class": layer_class})
    if budget is not None:
        rules = rules | {"budget": budget}
    return kind(config, artifact if method.calibrated or method.by_need else None, **rules)


def layer_class_of(name: str) -> type[SparseLayer]:
    """Return the class of the layers of a method.

    Raises:
        InputError: your own method cannot be imported, or is no such class.
    """
    module, _, layer = method_of(name).layer.rpartition(".")
    try:
        found: type[SparseLayer] = getattr(import_module(module), layer)
    except Exception as fault:  # whatever its module raises
        raise InputError(f"method {name!r} cannot be imported: {type(fault).__name__}: {fault}") from fault
    if not isinstance(found, type) or not issubclass(found, SparseLayer) or inspect.isabstract(found):
        raise InputError(f"method {name!r} must be a complete subclass of bpc_calib.runtime.layers.SparseLayer")
    return found


def learners(methods: Iterable[str]) -> dict[str, Learner]:
    """Return what learns from text beforehand, by method, of the methods that do."""
    classes = {name: layer_class_of(name) for name in methods}
    return {name: each.learn for name, each in classes.items() if hasattr(each, "learn")}


def learn_methods(
    model: Any,
    ids: Tensor,
    methods: Iterable[str],
    comparison: Comparison,
    finished: MutableMapping[str, Any] | None = None,
    progress: Callable[[float, str], None] = lambda share, what: None,
) -> tuple[Mapping[str, Learned], dict[str, float]]:
    """Let the methods that learn do so; return what `evaluate` takes, and the seconds of each.

    Args:
        model: an enabled model.
        ids: texts, as `draw_lessons` returns them.
        methods: that are compared.
        comparison: its rules say which layers choose.
        finished: as for `evaluate`.
        progress: as for `evaluate`.
    """
    layers = make_cache("random", model.config, None, None, **comparison.rules).layers
    choosing = [index for index, layer in enumerate(layers) if isinstance(layer, SparseLayer)]
    kept = {} if finished is None else finished
    return learn(model, ids, learners(methods), choosing, kept, seed=comparison.seed, progress=progress)


def settled(config: Any, artifact: ProjectionArtifact | None, rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return rules that name the dense layers, and whether all KV heads attend to as many tokens.

    Args:
        config: `model.config`.
        artifact: whose defaults hold, for the methods without an artifact too.
        rules: arguments of `BPCCache`; None, or absent: the default.
    """
    dense = rules.get("dense_layers")
    if dense is None:
        dense = default_dense_layers(artifact, describe(config).num_layers)
    equal = bool(rules.get("equal_shares")) or artifact is None or not artifact.has_needs
    return {**rules, "dense_layers": dense, "equal_shares": equal}


def check(
    config: Any, artifact: ProjectionArtifact | None, comparison: Comparison
) -> tuple[tuple[str, ...], dict[tuple[int, str], list[Variant]]]:
    """Return the methods that are compared, and what can be computed: methods and budgets of each length and task.

    A warning names what is left out, because nothing is left to choose, or because a length cannot be.

    Raises:
        InputError: an argument is wrong, or nothing can be computed; the message names it.
        ArtifactError: the artifact belongs to another model.
        ModelError: BPC cannot serve the model.
    """
    chosen = check_settings(comparison, calibrated=artifact is not None)
    rules = comparison.rules
    for name in chosen:
        for budget in comparison.budgets:
            make_cache(name, config, artifact, budget, **rules)
    if TEXT in comparison.tasks and not comparison.corpora:
        raise InputError(f"task {TEXT!r} needs a corpus")
    recent = rules.get("recent", ranking_defaults(artifact)["recent"])
    cells, faults = computable(comparison, chosen, describe(config).context_limit, recent)
    for fault in faults:
        logger.warning("skipped: %s", fault)
    return chosen, cells
