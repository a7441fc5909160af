"""Run tasks of lm_eval (EleutherAI's evaluation harness, extra `eval`) with answers that BPC decodes."""

import math
from collections.abc import Sequence
from typing import Any

from bpc_artifacts import ProjectionArtifact
from bpc_calib.evaluation.compared_cache import make_cache
from bpc_calib.evaluation.harness_model import harness_model
from bpc_calib.evaluation.harness_tasks import HarnessTask
from bpc_calib.evaluation.methods import variants
from bpc_calib.runtime.cache import BPCCache

__all__ = ["run"]


def run(
    model: Any,
    tokenizer: Any,
    artifact: ProjectionArtifact | None,
    task: HarnessTask,
    methods: Sequence[str],
    budgets: Sequence[float | int],
    *,
    limit: int,
    raw: bool = False,
    seed: int = 0,
    **rules: Any,
) -> list[dict[str, Any]]:
    """Return rows like those of `evaluate` for the first `limit` documents; `metrics` has all numbers of lm_eval.

    A tokenizer with a chat template gets the prompts in it, unless `raw`.
    """
    from lm_eval import simple_evaluate

    rows = []
    for name, budget in variants(methods, budgets):

        def empty(name: str = name, budget: float | int | None = budget) -> BPCCache:
            return make_cache(name, model.config, artifact, budget, seed=seed, **rules)

        report = simple_evaluate(
            harness_model(model, tokenizer, empty),
            tasks=task.tasks,
            task_manager=task.manager,
            limit=limit,
            bootstrap_iters=1000,
            verbosity="ERROR",
            log_samples=False,
            apply_chat_template=bool(tokenizer.chat_template) and not raw,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
        for label, metrics in report["results"].items():
            figures = {key: v for key, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
            count = report["n-samples"][label]["effective"] if label in report["n-samples"] else limit
            row = {"task": f"lm_eval:{label}", "tokens": task.tokens, "method": name, "budget": budget}
            rows.append(row | {"prompts": count, "metrics": _measured(figures)})
    return rows


def _measured(figures: dict[str, Any]) -> dict[str, Any]:
    """Leave out the metrics of other lengths, which RULER's tasks set to -1."""
    others = {key.split(",")[0] for key, value in figures.items() if value == -1 and key[0].isdecimal()}
    return {key: value for key, value in figures.items() if key.split(",")[0].removesuffix("_stderr") not in others}
