"""What `evaluate` compares, checked before any work, and the cache of each method."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.evaluation.methods import BPC_LAYER, METHODS, Variant, variants
from bpc_calib.evaluation.tasks import TASKS, TEXT
from bpc_calib.method.budget import attended
from bpc_calib.method.defaults import BUDGET, MIN_TOKENS, budget_text
from bpc_calib.method.rules import default_dense_layers, ranking_defaults
from bpc_calib.models.description import describe
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.text.known_corpora import Corpus

__all__ = ["FORCED", "HARD", "Comparison", "check", "make_cache", "settled"]

logger = logging.getLogger("bpc_calib")

FORCED = 64  # last tokens of each text, decoded one at a time, unless a comparison says otherwise

# No dense layer and no minimum, so that every layer must choose: this setting shows differences between methods best.
HARD: dict[str, Any] = {"dense_layers": (), "min_tokens": 1}


def make_cache(
    name: str, config: Any, artifact: ProjectionArtifact | None, budget: float | int | None, **rules: Any
) -> BPCCache:
    """An empty cache that attends as this method does.

    The safeguard is BPC's; the other methods choose by their ranking alone. What is forced, which layers are dense, and
    how the scores of a group become one, are the same for all: the artifact says, where `rules` do not. Where it has
    the needs of the KV heads, `bpc` and `oracle` share the budget by these; the others give every head the mean.

    Args:
        name: one of `METHODS`, or "full".
        config: `model.config`.
        artifact: projections of the model, which calibrated methods need.
        budget: share of the tokens in (0, 1], or a number of tokens; None: the default of `BPCCache`.
        rules: other arguments of `BPCCache`.

    Raises:
        InputError: rules out of range, or a `min_context`: below it there would be nothing to compare.
    """
    if rules.get("min_context"):
        raise InputError("min_context makes short contexts full attention, so methods are not compared with it")
    rules["min_context"] = 0
    if name == "full":
        return BPCCache(config, budget=1.0, dense_layers=())
    method, defaults = METHODS[name], ranking_defaults(artifact)
    rules = {"group": defaults["group"], "recent": defaults["recent"]} | settled(config, artifact, rules)
    if method.layer != BPC_LAYER:
        rules = rules | {"safeguard": 0.0}
    module, _, layer = method.layer.rpartition(".")
    layer_class = getattr(import_module(module), layer)
    kind: type[BPCCache] = type("ComparedCache", (BPCCache,), {"layer_class": layer_class})
    if budget is not None:
        rules = rules | {"budget": budget}
    return kind(config, artifact if method.calibrated or method.by_need else None, **rules)


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


@dataclass(frozen=True)
class Comparison:
    """Methods to compare with full attention, and the prompts to compare them on."""

    tasks: Sequence[str] = (TEXT, "needle")  # names of `bpc_calib.evaluation.tasks.TASKS`, and `TEXT`
    lengths: Sequence[int] = (2048,)  # tokens of a prompt, including its question and answer
    budgets: Sequence[float | int] = (BUDGET, 0.1)  # shares or numbers of tokens
    methods: Sequence[str] | None = None  # names of `METHODS`; None: all
    prompts: int = 20  # per task and length
    corpora: Sequence[Corpus] = ()  # sources of `TEXT`, which needs at least one
    forced: int = FORCED  # last tokens of each text, decoded one at a time
    seed: int = 0
    raw: bool = False  # leave the model's chat template out; `TEXT` is never in a template
    batch: int | None = None  # prompts per batch; None: as many as fit in 65,536 tokens
    rules: Mapping[str, Any] = field(default_factory=dict)  # settings of `BPCCache`, such as `HARD`


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
    tasks, lengths, budgets, rules = comparison.tasks, comparison.lengths, comparison.budgets, comparison.rules
    possible = tuple(name for name, method in METHODS.items() if artifact is not None or not method.calibrated)
    chosen = possible if comparison.methods is None else tuple(dict.fromkeys(comparison.methods))
    for task in tasks:
        if task != TEXT and task not in TASKS:
            raise InputError(f"unknown task {task!r}: the tasks are {', '.join([TEXT, *TASKS])}")
    for name in chosen:
        if name not in METHODS:
            raise InputError(f"unknown method {name!r}: the methods are {', '.join(METHODS)}")
        if name not in possible:
            raise InputError(f"method {name!r} needs an artifact of this model; method 'bpc-online' needs none")
        for budget in budgets:
            make_cache(name, config, artifact, budget, **rules)
    for values, what in ((lengths, "length"), (budgets, "budget"), (chosen, "method")):
        if not values:
            raise InputError(f"give at least one {what}")
    if comparison.prompts < 1:
        raise InputError(f"prompts must be at least 1, not {comparison.prompts}")
    if TEXT in tasks and not comparison.corpora:
        raise InputError(f"task {TEXT!r} needs a corpus")
    if comparison.forced < 2:
        raise InputError(f"at least 2 tokens of a text must be forced, not {comparison.forced}")
    cells: dict[tuple[int, str], list[Variant]] = {}
    faults: dict[str, None] = {}
    recent = rules.get("recent", ranking_defaults(artifact)["recent"])
    for length, task in itertools.product(lengths, tasks):
        if (fault := _impossible(length, task, describe(config).context_limit, comparison.forced)) is not None:
            faults[fault] = None
            continue
        for variant in variants(chosen, budgets):
            name, share = variant
            k = length if share is None else attended(length, share, rules.get("min_tokens", MIN_TOKENS))
            if share is not None and k <= (forced := max(METHODS[name].forced, recent)):
                what, who = f"a budget of {budget_text(share)} is {k} of {length:,} tokens", METHODS[name].label
                faults[f"{what}, and {who} always attends to {forced}: nothing is left to choose"] = None
            else:
                cells.setdefault((length, task), []).append(variant)
    if faults and not cells:
        raise InputError(next(iter(faults)))
    for fault in faults:
        logger.warning("skipped: %s", fault)
    return chosen, cells


def _impossible(length: int, task: str, limit: int | None, forced: int) -> str | None:
    """Why a task cannot have prompts of a length, if it cannot."""
    if length < 1:
        return f"prompts must have at least 1 token, not {length}"
    if limit is not None and length > limit:
        return f"prompts of {length:,} tokens are too long: the model's limit is {limit:,}"
    if task == TEXT and length < 2 * forced:
        return f"task {TEXT!r} needs at least {2 * forced} tokens, twice those that are forced, not {length}"
    return None
