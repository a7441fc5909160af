"""Run tasks of lm_eval (EleutherAI's evaluation harness, extra `eval`) with answers that BPC decodes."""

import contextlib
import functools
import io
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from bpc_artifacts import ProjectionArtifact
from bpc_calib.compat import keep_lm_eval_from_git
from bpc_calib.errors import InputError
from bpc_calib.evaluation.comparison import Comparison, make_cache
from bpc_calib.evaluation.decoded import Finished
from bpc_calib.evaluation.forcing import force, fork, log_likelihoods, prefill
from bpc_calib.evaluation.learning import Learned
from bpc_calib.evaluation.methods import variants
from bpc_calib.extras import lacking
from bpc_calib.models.description import describe
from bpc_calib.runtime.cache import BPCCache

__all__ = ["HarnessTask", "check", "harness_model", "prepare", "run"]

NEW_TOKENS = 256  # of an answer, if a task sets no limit


@dataclass(frozen=True)
class HarnessTask:
    """A task that lm_eval can run: `tasks` and `manager` as `lm_eval.simple_evaluate` takes them.

    `tokens` is the length that its prompts were made for; None: the task has prompts of its own.
    """

    name: str
    tokens: int | None
    tasks: list[Any]
    manager: Any


def check(tasks: Sequence[str]) -> None:
    """Raise `InputError` if lm_eval is not installed or does not know a task."""
    if lacks := lacking("eval", "lm_eval"):
        raise InputError(f"tasks of lm_eval need the package {lacks}")
    find = _finder({})
    for task in tasks:
        find(task)


def prepare(tasks: Sequence[str], tokenizer: Any, lengths: Sequence[int], seed: int) -> list[HarnessTask]:
    """Return the tasks in their order; a task that makes its data stands there once per length.

    The data of a length are those that lm_eval makes with the metadata `tokenizer` and `max_seq_lengths`, and with all
    its seeds set to `seed`. They are made once, so that every method gets the same prompts.

    Args:
        tasks: names of lm_eval.
        tokenizer: the tokenizer of the model.
        lengths: tokens of the prompts, for tasks that make their data.
        seed: for all draws of lm_eval.

    Raises:
        InputError: a task is unknown, or its data cannot be loaded or made; the message names it.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        metadata: dict[str, Any] = {"tokenizer": folder}
        find = _finder(metadata)
        for task in tasks:
            name, manager = find(task)
            for length in lengths:
                metadata["max_seq_lengths"] = [length]  # the manager reads this when it loads a task
                loaded = _load(task, name, manager, seed)
                if not any(callable(getattr(each.config, "custom_dataset", None)) for each in loaded):
                    found.append(HarnessTask(task, None, [name], manager))
                    break
                found.append(HarnessTask(task, length, loaded, manager))
    return found


def _finder(metadata: dict[str, Any]) -> Callable[[str], tuple[str, Any]]:
    """Return a function from a task to its name and the `TaskManager` that has it; FOLDER/NAME.yaml is the user's own.

    Each manager is made once, because lm_eval reads every task's file for that, which takes seconds.
    """
    from lm_eval.tasks import TaskManager

    make = functools.cache(functools.partial(TaskManager, metadata=metadata))

    def find(task: str) -> tuple[str, Any]:
        path = Path(task)
        if path.suffix == ".yml":
            raise InputError(f"{task}: lm_eval reads a task only from a file whose name ends in .yaml")
        if path.suffix == ".yaml":
            if not path.is_file():
                raise InputError(f"{task}: there is no such file")
            name, manager = path.stem, make(include_path=str(path.parent), include_defaults=False)
            fault = (
                f"{task} does not define a task named {name!r}: give the file the name that stands after `task:` in it"
            )
        else:
            name, manager = task, make()
            fault = f"lm_eval has no task {task!r}: `lm_eval ls tasks` lists its tasks"
        if not manager.match_tasks([name]):
            raise InputError(fault)
        return name, manager

    return find


def _load(task: str, name: str, manager: Any, seed: int) -> list[Any]:
    """Return the tasks of this name, with their data; what lm_eval prints meanwhile is left out."""
    # This module keeps a random state: import it anew, as in a run of lm_eval alone.
    sys.modules.pop("lm_eval.tasks.ruler.cwe_utils", None)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return list(manager.load([name])["tasks"].values())
    except Exception as fault:  # a missing package or file, no network
        reason = (str(fault).strip() or type(fault).__name__).splitlines()[0]
        raise InputError(f"lm_eval:{task}: its data cannot be loaded: {reason}") from fault


def harness_model(model: Any, tokenizer: Any, empty: Callable[[], BPCCache]) -> Any:
    """Return an lm_eval model that runs an enabled `model` (`bpc_calib.enable`) with caches from `empty()`.

    The context without its last token is prefilled densely. The last token and every token of the answer are decoding
    steps, both for generated answers and for answers whose likelihood is measured.

    Raises:
        InputError: from the model returned, where a task samples its answers.
    """
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
        tokenizer_name = str(tokenizer.name_or_path).replace("/", "__")
        prefix_token_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            if add_special_tokens is None:
                add_special_tokens = not (tokenizer.bos_token and string.startswith(tokenizer.bos_token))
            return list(tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            from jinja2 import TemplateError

            def write(messages: list[dict[str, str]]) -> str:
                more = {"add_generation_prompt": add_generation_prompt}
                more["continue_final_message"] = not add_generation_prompt
                return str(tokenizer.apply_chat_template(messages, tokenize=False, **more))

            try:
                return write(chat_history)
            except TemplateError:  # some templates know no system message; lm_eval leaves it out, too
                return write([message for message in chat_history if message["role"] != "system"])

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


def run(
    model: Any,
    tokenizer: Any,
    artifact: ProjectionArtifact | None,
    task: HarnessTask,
    methods: Sequence[str],
    comparison: Comparison,
    *,
    learned: Mapping[str, Learned] = MappingProxyType({}),
    finished: Finished | None = None,
) -> list[dict[str, Any]]:
    """Return rows like those of `evaluate`; `metrics` has all numbers of lm_eval.

    Args:
        model: an enabled model.
        tokenizer: its tokenizer; with a chat template, prompts are put into it.
        artifact: projections of the model, which calibrated methods need.
        task: as `prepare` returns it.
        methods: names that `method_of` knows.
        comparison: its budgets and rules; `prompts` is the number of documents, the first ones of the task, and `seed`
            is for lm_eval and online projections, too.
        learned: as for `evaluate`.
        finished: as for `evaluate`; one part is a method with a budget.

    Raises:
        InputError: rules out of range, or the task samples its answers.
    """
    from lm_eval import simple_evaluate

    keep_lm_eval_from_git()
    finished, rows = {} if finished is None else finished, []
    limit, raw, seed = comparison.prompts, comparison.raw, comparison.seed
    for name, budget in variants(methods, comparison.budgets):
        part = f"{task.name} {task.tokens} {name} {budget} {limit} {raw} {seed} {version('lm_eval')}"
        if part not in finished:
            given, rules = (name, model.config, artifact, budget, learned.get(name)), comparison.rules
            empty = functools.partial(make_cache, *given, seed=seed, **rules)
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
            finished[part] = [
                {"task": f"lm_eval:{label}", "tokens": task.tokens, "method": name, "budget": budget}
                | {"prompts": count, "metrics": metrics}
                for label, count, metrics in _figures(report, limit)
            ]
        rows += finished[part]
    return rows


def _figures(report: dict[str, Any], limit: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The name, the documents and the metrics of each task in a report of lm_eval."""
    for label, found in report["results"].items():
        figures = {key: v for key, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}
        count = report["n-samples"][label]["effective"] if label in report["n-samples"] else limit
        # RULER's tasks set the metrics of other lengths to -1.
        others = {key.split(",")[0] for key, value in figures.items() if value == -1 and key[0].isdecimal()}
        yield label, count, {k: v for k, v in figures.items() if k.split(",")[0].removesuffix("_stderr") not in others}
