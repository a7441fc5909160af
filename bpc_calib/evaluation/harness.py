"""Run tasks of lm_eval (EleutherAI's evaluation harness, extra `eval`) with answers that BPC decodes.

The context without its last token is prefilled densely. The last token and every token of the answer are decoding
steps, both for generated answers and for answers whose likelihood is measured.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.evaluation.compared_cache import make_cache
from bpc_calib.evaluation.forcing import force, fork, log_likelihoods, prefill
from bpc_calib.evaluation.methods import variants
from bpc_calib.models.description import describe
from bpc_calib.runtime.cache import BPCCache

__all__ = ["check", "harness_model", "run"]

NEW_TOKENS = 256  # if a task sets no limit


def check(tasks: Sequence[str]) -> None:
    """Raise `InputError` if lm_eval is not installed or does not know a task."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as fault:
        raise InputError("tasks of lm_eval need the package lm_eval: pip install 'bpc-calib[eval]'") from fault
    for task in tasks:
        _find(task)


def _find(task: str) -> tuple[str, Any]:
    """Return the name of a task and the `TaskManager` that has it; FOLDER/NAME.yaml is a task of the user's."""
    from lm_eval.tasks import TaskManager

    path = Path(task)
    if path.suffix == ".yaml":
        if not path.is_file():
            raise InputError(f"{task}: there is no such file")
        manager = TaskManager(include_path=str(path.parent), include_defaults=False)
        name, fault = path.stem, f"{task} does not define a task named {path.stem!r}"
    else:
        manager, name = TaskManager(), task
        fault = f"lm_eval has no task {task!r}: `lm_eval ls tasks` lists its tasks"
    if not manager.match_tasks([name]):
        raise InputError(fault)
    return name, manager


def run(
    model: Any,
    tokenizer: Any,
    artifact: ProjectionArtifact | None,
    task: str,
    methods: Sequence[str],
    budgets: Sequence[float | int],
    *,
    limit: int,
    seed: int = 0,
    **rules: Any,
) -> list[dict[str, Any]]:
    """Return rows like those of `evaluate` for the first `limit` documents; `metrics` has all numbers of lm_eval."""
    from lm_eval import simple_evaluate

    task, manager = _find(task)
    rows = []
    for name, budget in variants(methods, budgets):

        def empty(name: str = name, budget: float | int | None = budget) -> BPCCache:
            return make_cache(name, model.config, artifact, budget, seed=seed, **rules)

        report = simple_evaluate(
            harness_model(model, tokenizer, empty),
            tasks=[task],
            task_manager=manager,
            limit=limit,
            bootstrap_iters=1000,
            verbosity="ERROR",
            log_samples=False,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
        for label, metrics in report["results"].items():
            figures = {key: v for key, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
            count = report["n-samples"][label]["effective"] if label in report["n-samples"] else limit
            row = {"task": f"lm_eval:{label}", "tokens": None, "method": name, "budget": budget, "prompts": count}
            rows.append(row | {"metrics": figures})
    return rows


def harness_model(model: Any, tokenizer: Any, empty: Callable[[], BPCCache]) -> Any:
    """Return an lm_eval model that runs an enabled `model` (`bpc_calib.enable`) with caches from `empty()`."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    limit = describe(model.config).context_limit or 1 << 30

    def begin(context: list[int]) -> tuple[BPCCache, list[int]]:
        """Return a cache with the context except its last token, and the last token."""
        cache = empty()
        if len(context) > 1:
            fork(prefill(model, torch.tensor([context[:-1]], device=model.device)), cache)
        return cache, context[-1:]

    class Decoding(TemplateLM):  # type: ignore[misc]
        eot_token_id = tokenizer.eos_token_id
        prefix_token_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            if add_special_tokens is None:
                add_special_tokens = not (tokenizer.bos_token and string.startswith(tokenizer.bos_token))
            return list(tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            answers = []
            for _, context, continuation in requests:
                if not continuation:
                    answers.append((0.0, True))
                    continue
                context = context[-max(1, limit - len(continuation)) :]
                cache, last = begin(context)
                ids = torch.tensor([last + continuation], device=model.device)
                likely, greedy = log_likelihoods(model, cache, ids)
                answers.append((float(likely.double().sum()), bool(greedy.all())))
            return answers

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            answers = []
            for (text,) in [request.args for request in requests]:
                tokens = self.tok_encode(text, add_special_tokens=False)
                windows = get_rolling_token_windows(tokens, self.prefix_token_id, limit, 1)
                parts = [(None, *make_disjoint_window(window)) for window in windows]
                answers.append(sum(likely for likely, _ in self._loglikelihood_tokens(parts)))
            return answers

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return [self._generate(*request.args) for request in requests]

        def _generate(self, text: str, settings: dict[str, Any]) -> str:
            if settings.get("do_sample") and settings.get("temperature", 1.0):
                raise InputError("this task samples its answers, but bpc eval decodes only greedily")
            until = settings.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            new = int(settings.get("max_gen_toks", NEW_TOKENS))
            cache, token = begin(self.tok_encode(text)[-max(1, limit - new) :])
            new_ids: list[int] = []
            answer = ""
            while len(new_ids) < new:
                logits = force(model, cache, torch.tensor([token], device=model.device))
                token = [int(logits.argmax())]
                if token[0] == self.eot_token_id:
                    break
                new_ids += token
                answer = tokenizer.decode(new_ids, skip_special_tokens=True)
                if any(stop in answer for stop in until):
                    break
            ends = [answer.index(stop) for stop in until if stop and stop in answer]
            return answer[: min(ends)] if ends else answer

    return Decoding()
