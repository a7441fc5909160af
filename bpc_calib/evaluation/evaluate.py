"""Compare methods on the same prompts with the same budget: needles and other tasks, and plain text."""

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.evaluation.comparison import Comparison, check, make_cache
from bpc_calib.evaluation.fidelity import METRICS, probe
from bpc_calib.evaluation.forcing import compare, complete, fork, keep, prefill
from bpc_calib.evaluation.methods import METHODS, variants
from bpc_calib.evaluation.prompts import Frame, Prompt, count_answer, hide, largest, make_frame
from bpc_calib.evaluation.statistics import mean, proportion
from bpc_calib.evaluation.tasks import GROWING, TASKS, TEXT, Problem, score
from bpc_calib.models.description import describe
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.text.samples import beginning, draw_samples

__all__ = ["draw_prompts", "evaluate"]

DEPTHS = 10  # needles are in the middle of each tenth of the text
BATCH_TOKENS = 1 << 16
MEASURED = 64  # decoding steps per text at which choices are compared: measuring one costs as much as several steps
OTHER_TEXT = 1 << 32  # added to the seed, so that made text differs from that of a calibration with the same seed

Progress = Callable[[float, str], None]
Variant = tuple[str, float | int | None]  # a method and its budget
Makers = Mapping[Variant, Callable[[], BPCCache]]  # of an empty cache


def evaluate(
    model: Any,
    tokenizer: Any,
    artifact: ProjectionArtifact | None = None,
    comparison: Comparison = Comparison(),  # noqa: B008  it is frozen
    *,
    progress: Progress = lambda share, what: None,
) -> list[dict[str, Any]]:
    """Compare methods with full attention; every measured token is one decoding step.

    The prefix of a prompt is computed once, densely, and copied to every method. A task's question is fed token by
    token, then the answer is decoded greedily. `TEXT` forces the last tokens of texts from the corpora, the same at
    every length, and measures perplexity, the divergence of the predictions from full attention's, and the part of full
    attention that each method's choice keeps (`FullAttention.kept`).

    Args:
        model: an enabled model (`bpc_calib.enable`).
        artifact: projections of the method `bpc`; None: leave this method out.
        comparison: methods, prompts and settings.
        progress: called with the finished share and a description of the current work.

    Returns:
        One row per task, length, method and budget. Metrics are dictionaries of `value`, `low` and `high`, with a 95 %
        interval. `read` is the share of the KV bytes that a step reads. With several corpora, `by_corpus` holds the
        metrics of `TEXT` for each. `log_likelihoods` has the mean over the forced tokens of each text.

    Raises:
        InputError: a task or method is unknown, a prompt is longer than the model's limit, or a budget leaves nothing
            to choose; the message names it.
    """
    methods = check(model.config, artifact, comparison)
    makers = {
        (name, budget): functools.partial(make_cache, name, model.config, artifact, budget, **comparison.rules)
        for name, budget in variants(methods, comparison.budgets)
    }
    steps = [(length, task) for length in comparison.lengths for task in comparison.tasks]
    if TEXT in comparison.tasks:
        texts, corpora = _draw_texts(model, tokenizer, comparison)
        start = len(beginning(tokenizer))
    frame = None if set(comparison.tasks) == {TEXT} else make_frame(tokenizer, comparison.raw)
    drawn = {
        (length, task): draw_prompts(task, tokenizer, length, comparison.prompts, comparison.seed, frame)
        for length, task in steps
        if task != TEXT
    }
    rows = []
    for number, (length, task) in enumerate(steps):
        batch = comparison.batch or max(1, BATCH_TOKENS // length)

        def report(part: float, number: int = number, length: int = length, task: str = task) -> None:
            progress((number + part) / len(steps), f"{task}, {length:,} tokens")

        report(0.0)
        if task == TEXT:
            # The same last tokens at every length, so that only the context differs.
            cut = torch.cat([texts[:, :start], texts[:, start - length :]], dim=1)
            rows += _text(model, makers, cut, corpora, comparison.forced, batch, report)
        else:
            rows += _task(model, tokenizer, makers, task, length, drawn[length, task], batch, report)
    progress(1.0, "done")
    return rows


def draw_prompts(
    task: str, tokenizer: Any, length: int, prompts: int, seed: int, frame: Frame | None = None
) -> list[Prompt]:
    """Return prompts of a task, the same for the same seed; needles are at the `DEPTHS` in turn.

    Args:
        task: one of `TASKS`.
        tokenizer: the tokenizer of the model.
        length: tokens of a prompt with the longest answer.
        prompts: number of prompts.
        seed: of the draws.
        frame: what stands around text and question; None: the tokenizer's BOS alone.

    Raises:
        InputError: the prompts need more tokens.
    """
    frame = frame or make_frame(tokenizer, raw=True)
    seeds = [f"{seed}/{task}/{length}/{number}" for number in range(prompts)]
    depths = [(number % DEPTHS + 0.5) / DEPTHS if task == "needle" else None for number in range(prompts)]
    if task in GROWING:
        problems, drawn = _grow(task, seeds, tokenizer, length, frame)
    else:
        drawn = list(map(random.Random, seeds))
        problems = [TASKS[task](rng) for rng in drawn]
    try:
        new = max(count_answer(problem, tokenizer) for problem in problems)
        return [
            hide(problem, tokenizer, length - new, rng, depth, frame=frame)
            for problem, rng, depth in zip(problems, drawn, depths, strict=True)
        ]
    except InputError as fault:
        raise InputError(f"task {task!r} at {length:,} tokens: {fault}") from fault


def _grow(
    task: str, seeds: Sequence[str], tokenizer: Any, length: int, frame: Frame
) -> tuple[list[Problem], list[random.Random]]:
    """Return problems that fill their prompts but for the longest answer of all, and the random states after them."""
    new, longest = 0, 1
    while longest > new:  # a problem of another size has another answer
        new = longest
        sizes = [largest(TASKS[task], seed, GROWING[task], tokenizer, length - new, frame) for seed in seeds]
        drawn = list(map(random.Random, seeds))
        problems = [TASKS[task](rng, size=size) for rng, size in zip(drawn, sizes, strict=True)]
        longest = max(count_answer(problem, tokenizer) for problem in problems)
    return problems, drawn


def _task(
    model: Any,
    tokenizer: Any,
    makers: Makers,
    task: str,
    length: int,
    prompts: Sequence[Prompt],
    batch: int,
    report: Callable[[float], None],
) -> list[dict[str, Any]]:
    """Return the rows of one task at one length: decode the answers with a new cache from every maker."""
    said: dict[Variant, str] = {}  # the answer to the first prompt
    scores: dict[Variant, list[float]] = {key: [] for key in makers}
    read: dict[Variant, float] = {}
    fed, new = len(prompts[0].ids), max(prompt.answer for prompt in prompts)
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        ids = torch.tensor([prompt.ids for prompt in part], device=model.device)
        # Cut before the longest question of the batch; with a shorter question, text before it is forced too.
        cut = fed - max(prompt.question for prompt in part)
        prefix = prefill(model, ids[:, :cut])
        for number, (key, make) in enumerate(makers.items(), start=1):
            cache = fork(prefix, make())
            tokens = complete(model, cache, ids[:, cut:], new)
            texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            said.setdefault(key, texts[0])
            scores[key] += [score(prompt.problem, text) for prompt, text in zip(part, texts, strict=True)]
            read[key] = _read(cache, fed + new)
            report((first + len(part) * number / len(makers)) / len(prompts))
    count, problem = len(prompts), prompts[0].problem
    all_or_nothing = all(len(prompt.problem.wanted) == 1 for prompt in prompts)
    rows = []
    for key, own in scores.items():
        figure = proportion(sum(own), count) if all_or_nothing else mean(own, least=0.0, most=1.0)
        row = _row(task, length, *key, count) | {"score": figure, "read": read[key]}
        asked = problem.question + problem.start
        row["example"] = {"fact": problem.statements[0], "question": asked, "said": said[key]}
        if task == "needle":
            by_depth = [own[place::DEPTHS] for place in range(min(DEPTHS, count))]
            row["depths"] = [proportion(sum(each), len(each)) for each in by_depth]
        rows.append(row)
    return rows


def _draw_texts(model: Any, tokenizer: Any, comparison: Comparison) -> tuple[Tensor, list[str]]:
    """Return plain text of the greatest length, int64 `[prompts, tokens]`, and the corpus of each prompt."""
    tokens, sources = draw_samples(
        list(comparison.corpora),
        tokenizer,
        samples=comparison.prompts,
        sequence_length=max(comparison.lengths),
        seed=comparison.seed + OTHER_TEXT,
        vocab_size=describe(model.config).vocab_size,
    )
    return tokens, [source["name"] for source in sources for _ in range(source["samples"])]


def _text(
    model: Any,
    makers: Makers,
    texts: Tensor,
    corpora: list[str],
    forced: int,
    batch: int,
    report: Callable[[float], None],
) -> list[dict[str, Any]]:
    """Return the rows of plain text: perplexity, and the metrics of each method's choice.

    Args:
        texts: int64 `[prompts, length]`.
        corpora: that of each prompt.
        forced: last tokens of a text, which are fed one at a time.
    """
    prompts, length = texts.shape
    choosing = [key for key in makers if METHODS[key[0]].takes_budget]
    likely, apart, kept = ({key: list[Tensor]() for key in makers} for _ in range(3))
    read: dict[Variant, float] = {}
    layers: list[int] = []
    done = 0
    for part in texts.split(batch):
        part = part.to(model.device)
        prefix = prefill(model, part[:, :-forced])
        tail, predicted = part[:, -forced:], list[Tensor]()
        if choosing:
            probed = probe(model.config, {key: makers[key]() for key in choosing}, -(-forced // MEASURED))
            predicted = keep(model, fork(prefix, probed), tail)
            layers = probed.asked_layers()
            for key, metrics in probed.found().items():
                kept[key].append(metrics)
        for key, make in makers.items():
            cache = fork(prefix, make())
            likelihood, divergence = compare(model, cache, tail, predicted)
            likely[key].append(likelihood)
            apart[key].append(divergence)
            read[key] = _read(cache, length)
            done += len(part)
            report(done / (prompts * len(makers)))
    rows = []
    for key, parts in likely.items():
        likelihood = torch.cat(parts)
        values = {}  # of each prompt
        if ("full", None) in likely:
            # Both losses are of the same texts, so the interval is that of their differences.
            values["loss_difference"] = torch.cat(likely["full", None]) - likelihood
        if choosing:
            values["kl"] = torch.cat(apart[key])
        row = _row(TEXT, length, *key, prompts) | {"read": read[key]}
        row["log_likelihoods"] = [round(value, 6) for value in likelihood.tolist()]  # to compare runs text by text
        if key in choosing:
            chosen = torch.cat(kept[key], dim=1)  # [layers, prompts, kv_heads, metrics]
            row["layers"] = layers
            for place, metric in enumerate(METRICS):
                values[metric] = chosen[..., place].mean((0, 2))
                by_head = chosen[..., place].mean(1).tolist()
                row[f"{metric}_by_head"] = [[round(v, 4) for v in layer] for layer in by_head]
        row |= _text_figures(likelihood, values)
        if len(names := list(dict.fromkeys(corpora))) > 1:
            row["by_corpus"] = {}
            for corpus in names:
                own = torch.tensor([each == corpus for each in corpora])
                of_corpus = {name: each[own] for name, each in values.items()}
                row["by_corpus"][corpus] = {"prompts": int(own.sum())} | _text_figures(likelihood[own], of_corpus)
        rows.append(row)
    return rows


def _text_figures(likelihood: Tensor, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the perplexity of some prompts, by the mean log-likelihood of each, and the means of other values."""
    perplexity = {side: round(math.exp(-value), 6) for side, value in mean(likelihood.tolist()).items()}
    figures = {"perplexity": perplexity | {"low": perplexity["high"], "high": perplexity["low"]}}
    return figures | {name: mean(each.tolist()) for name, each in values.items()}


def _row(task: str, length: int, name: str, budget: float | int | None, prompts: int) -> dict[str, Any]:
    return {"task": task, "tokens": length, "method": name, "budget": budget, "prompts": prompts}


def _read(cache: BPCCache, length: int) -> float:
    """Return the share of the KV bytes that a step reads."""
    read, full = cache.kv_bytes(length)
    return round(read / full, 6)
