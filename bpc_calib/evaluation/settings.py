"""What is compared, and what it must be on any model. Importing this file is cheap: `bpc eval` checks with it."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bpc_calib.errors import InputError
from bpc_calib.evaluation.methods import METHODS, Variant, method_of, variants
from bpc_calib.evaluation.tasks import TASKS, TEXT
from bpc_calib.method.budget import attended
from bpc_calib.method.defaults import BUDGET, MIN_TOKENS, PRESETS, budget_text
from bpc_calib.method.numbers import check_count
from bpc_calib.text.known_corpora import Corpus

__all__ = ["FORCED", "HARD", "Comparison", "check_prompts", "check_settings", "computable"]

FORCED = 64  # last tokens of each text, decoded one at a time, unless a comparison says otherwise

HARD = {part: value for part, value in PRESETS["hard"].items() if part != "budget"}


@dataclass(frozen=True)
class Comparison:
    """Methods to compare with full attention, and the prompts to compare them on."""

    tasks: Sequence[str] = (TEXT, "needle")  # names of `bpc_calib.evaluation.tasks.TASKS`, and `TEXT`
    lengths: Sequence[int] = (2048,)  # tokens of a prompt, including its question and answer
    budgets: Sequence[float | int] = (BUDGET, 0.1)  # shares or numbers of tokens
    methods: Sequence[str] | None = None  # names that `method_of` knows; None: all that need not learn from text
    prompts: int = 20  # per task and length
    corpora: Sequence[Corpus] = ()  # sources of `TEXT`, which needs at least one
    forced: int = FORCED  # last tokens of each text, decoded one at a time
    seed: int = 0
    raw: bool = False  # leave the model's chat template out; `TEXT` is never in a template
    batch: int | None = None  # prompts per batch; None: as many as fit in 65,536 tokens
    rules: Mapping[str, Any] = field(default_factory=dict)  # settings of `BPCCache`, such as `HARD`


def check_settings(comparison: Comparison, *, calibrated: bool) -> tuple[str, ...]:
    """Return the methods that are compared; raise `InputError` for what cannot be compared on any model.

    Args:
        comparison: its corpora are not looked at.
        calibrated: whether there are projections.
    """
    tasks, forced = comparison.tasks, comparison.forced
    usual = (name for name, method in METHODS.items() if (calibrated or not method.calibrated) and not method.learns)
    chosen = tuple(usual if comparison.methods is None else dict.fromkeys(comparison.methods))
    for task in tasks:
        if task != TEXT and task not in TASKS:
            raise InputError(f"unknown task {task!r}: the tasks are {', '.join([TEXT, *TASKS])}")
    for name in chosen:
        if method_of(name).calibrated and not calibrated:
            raise InputError(f"method {name!r} needs an artifact of this model; method 'bpc-online' needs none")
    for values, what in ((comparison.lengths, "length"), (comparison.budgets, "budget"), (chosen, "method")):
        if not values:
            raise InputError(f"give at least one {what}")
    check_prompts(comparison.prompts)
    if forced < 2:
        raise InputError(f"at least 2 tokens of a text must be forced, not {forced}")
    for length in comparison.lengths:
        check_count("length", length)
    computable(comparison, chosen, None, comparison.rules.get("recent") or 0)
    return chosen


def check_prompts(prompts: int) -> None:
    """Raise `InputError` unless there can be as many prompts per task and length."""
    check_count("prompts", prompts, 1, 1 << 20)  # all are made before the first is answered


def computable(
    comparison: Comparison, methods: Iterable[str], limit: int | None, recent: int
) -> tuple[dict[tuple[int, str], list[Variant]], list[str]]:
    """Return what can be computed, methods and budgets of each length and task, and why the rest cannot.

    Args:
        comparison: its corpora are not looked at.
        methods: that are compared.
        limit: tokens that the model takes; None: any number.
        recent: how many of the newest tokens every method attends to.

    Raises:
        InputError: nothing can be computed.
    """
    cells: dict[tuple[int, str], list[Variant]] = {}
    faults: dict[str, None] = {}
    for length, task in itertools.product(comparison.lengths, comparison.tasks):
        if limit is not None and length > limit:
            faults[f"prompts of {length:,} tokens are too long: the model's limit is {limit:,}"] = None
        elif task == TEXT and length < (least := 2 * comparison.forced):
            what = f"task {TEXT!r} needs at least {least} tokens, twice those that are forced"
            faults[f"{what}, not {length}"] = None
        else:
            for variant in variants(methods, comparison.budgets):
                if (fault := _nothing_to_choose(comparison, length, variant, recent)) is None:
                    cells.setdefault((length, task), []).append(variant)
                else:
                    faults[fault] = None
    if faults and not cells:
        raise InputError(next(iter(faults)))
    return cells, list(faults)


def _nothing_to_choose(comparison: Comparison, length: int, variant: Variant, recent: int) -> str | None:
    """Why a method has nothing to choose at a budget, if it has not."""
    (name, budget), least = variant, comparison.rules.get("min_tokens", MIN_TOKENS)
    if budget is None or (k := attended(length, budget, least)) > (forced := max(method_of(name).forced, recent)):
        return None
    what = f"a budget of {budget_text(budget)} is {k} of {length:,} tokens"
    return f"{what}, and {method_of(name).label} always attends to {forced}: nothing is left to choose"
