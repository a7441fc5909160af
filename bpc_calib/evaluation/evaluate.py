"""Compare methods on the same prompts with the same budget: needles and other tasks, and plain text."""

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

__all__ = ["DEPTHS", "Answers", "ask", "draw_prompts", "evaluate", "hide_all"]

DEPTHS = 10  # needles are in the middle of each tenth of the text
BATCH_TOKENS = 1 << 16
MEASURED = 64  # decoding steps per text at which choices are compared: measuring one costs as much as several steps
OTHER_TEXT = 1 << 32  # added to the seed, so that made text differs from that of a calibration with the same seed

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class _Setting:
    """The settings that all tasks share."""

    model: Any
    tokenizer: Any
    artifact: ProjectionArtifact | None
    methods: Sequence[str]
    comparison: Comparison

    def caches(self) -> dict[tuple[str, float | int | None], Callable[[], BPCCache]]:
        """Return a function per variant that makes an empty cache."""
        rules = self.comparison.rules
        return {
            (name, budget): functools.partial(make_cache, name, self.model.config, self.artifact, budget, **rules)
            for name, budget in variants(self.methods, self.comparison.budgets)
        }


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
    attention that each method's choice keeps (`measure`).

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
    setting = _Setting(model, tokenizer, artifact, check(model.config, artifact, comparison), comparison)
    tasks, prompts, seed = comparison.tasks, comparison.prompts, comparison.seed
    texts = _draw_texts(setting) if TEXT in tasks else None
    steps = [(length, task) for length in comparison.lengths for task in tasks]
    frame = None if set(tasks) == {TEXT} else make_frame(tokenizer, comparison.raw)
    drawn = {
        (length, task): draw_prompts(task, tokenizer, length, prompts, seed, frame)
        for length, task in steps
        if task != TEXT
    }
    rows = []
    for number, (length, task) in enumerate(steps):
        batch_size = comparison.batch or max(1, BATCH_TOKENS // length)

        def report(part: float, number: int = number, length: int = length, task: str = task) -> None:
            progress((number + part) / len(steps), f"{task}, {length:,} tokens")

        report(0.0)
        if texts is not None and task == TEXT:
            rows += _text(setting, texts, length, batch_size, report)
        else:
            rows += _task(setting, task, length, drawn[length, task], batch_size, report)
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
        return hide_all(problems, tokenizer, length, drawn, depths, frame=frame)
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
    setting: _Setting, task: str, length: int, prompts: Sequence[Prompt], batch: int, report: Callable[[float], None]
) -> list[dict[str, Any]]:
    """Return the rows of one task at one length."""
    count, problem = len(prompts), prompts[0].problem
    all_or_nothing = all(len(prompt.problem.wanted) == 1 for prompt in prompts)
    answers = ask(setting.model, setting.tokenizer, prompts, setting.caches(), batch, report)
    rows = []
    for (name, budget), answer in answers.items():
        figure = proportion(sum(answer.scores), count) if all_or_nothing else mean(answer.scores, least=0.0, most=1.0)
        row = _row(task, length, name, budget, count) | {"score": figure, "read": round(answer.read, 6)}
        row["example"] = {
            "fact": problem.statements[0],
            "question": problem.question + problem.start,
            "said": answer.said[0],
        }
        if task == "needle":
            by_depth = [answer.scores[place::DEPTHS] for place in range(min(DEPTHS, count))]
            row["depths"] = [proportion(sum(scores), len(scores)) for scores in by_depth]
        rows.append(row)
    return rows


def hide_all(
    problems: Sequence[Problem],
    tokenizer: Any,
    length: int,
    drawn: Sequence[random.Random],
    depths: Sequence[float | None],
    style: str | None = None,
    frame: Frame | None = None,
) -> list[Prompt]:
    """Return prompts that all leave room for the longest answer within `length` tokens.

    Args:
        problems: what is asked.
        tokenizer: the tokenizer of the model.
        length: tokens of a prompt with the longest answer.
        drawn: a source of draws for each problem.
        depths: where the first statement of each problem stands, from 0 to 1; None: anywhere.
        style, frame: as in `hide`.

    Raises:
        InputError: a problem needs more tokens.
    """
    new = max(count_answer(problem, tokenizer) for problem in problems)
    return [
        hide(problem, tokenizer, length - new, rng, depth, style=style, frame=frame)
        for problem, rng, depth in zip(problems, drawn, depths, strict=True)
    ]


@dataclass
class Answers:
    """A method's answer to each prompt, the scores of the answers, and the share of KV bytes that a step reads."""

    said: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    read: float = 0.0


def ask(
    model: Any,
    tokenizer: Any,
    asked: Sequence[Prompt],
    makers: Mapping[Any, Callable[[], BPCCache]],
    batch: int,
    report: Callable[[float], None] = lambda part: None,
) -> dict[Any, Answers]:
    """Feed prompts of one length, and decode each answer with a new cache from every maker.

    Args:
        asked: the prompts.
        makers: functions that make an empty cache, by any key.
        batch: prompts per batch.
        report: called with the finished share.

    Returns:
        Answers by the same keys.
    """
    answers = {key: Answers() for key in makers}
    length, new = len(asked[0].ids), max(prompt.answer for prompt in asked)
    for first in range(0, len(asked), batch):
        part = asked[first : first + batch]
        ids = torch.tensor([prompt.ids for prompt in part], device=model.device)
        # Cut before the longest question of the batch; with a shorter question, text before it is forced too.
        cut = length - max(prompt.question for prompt in part)
        prefix = prefill(model, ids[:, :cut])
        for number, (key, make) in enumerate(makers.items(), start=1):
            cache, answer = fork(prefix, make()), answers[key]
            tokens = complete(model, cache, ids[:, cut:], new)
            texts = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens.tolist()]
            answer.said += texts
            answer.scores += [score(prompt.problem, text) for prompt, text in zip(part, texts, strict=True)]
            answer.read = _read(cache, length + new)
            report((first + len(part) * number / len(makers)) / len(asked))
    return answers


@dataclass(frozen=True)
class _Texts:
    """Plain text of the greatest length: int64 `[prompts, tokens]`, and the corpus of each prompt."""

    tokens: Tensor
    corpora: list[str]
    start: int  # tokens at the beginning that are not of a text: a BOS

    def cut(self, length: int) -> Tensor:
        """Return `[prompts, length]`: the same last tokens at every length, so that only the context differs."""
        return torch.cat([self.tokens[:, : self.start], self.tokens[:, self.start - length :]], dim=1)


def _draw_texts(setting: _Setting) -> _Texts:
    comparison = setting.comparison
    tokens, sources = draw_samples(
        list(comparison.corpora),
        setting.tokenizer,
        samples=comparison.prompts,
        sequence_length=max(comparison.lengths),
        seed=comparison.seed + OTHER_TEXT,
        vocab_size=describe(setting.model.config).vocab_size,
    )
    names = [source["name"] for source in sources for _ in range(source["samples"])]
    return _Texts(tokens, names, len(beginning(setting.tokenizer)))


def _text(
    setting: _Setting, texts: _Texts, length: int, batch: int, report: Callable[[float], None]
) -> list[dict[str, Any]]:
    """Return the rows of plain text: perplexity, and the metrics of each method's choice."""
    prompts, forced = len(texts.corpora), setting.comparison.forced
    makers = setting.caches()
    likely: dict[Any, list[Tensor]] = {key: [] for key in makers}
    apart: dict[Any, list[Tensor]] = {key: [] for key in makers}
    kept: dict[Any, list[Tensor]] = {key: [] for key in makers if METHODS[key[0]].takes_budget}
    read: dict[Any, float] = {}
    layers: list[int] = []
    done = 0
    for part in texts.cut(length).split(batch):
        part = part.to(setting.model.device)
        prefix = prefill(setting.model, part[:, :-forced])
        tail, predicted = part[:, -forced:], list[Tensor]()
        if kept:
            probed = probe(setting.model.config, {key: makers[key]() for key in kept}, -(-forced // MEASURED))
            predicted = keep(setting.model, fork(prefix, probed), tail)
            layers = probed.asked_layers()
            for key, metrics in probed.found().items():
                kept[key].append(metrics)
        for key, make in makers.items():
            cache = fork(prefix, make())
            likelihood, divergence = compare(setting.model, cache, tail, predicted)
            likely[key].append(likelihood)
            apart[key].append(divergence)
            read[key] = _read(cache, length)
            done += len(part)
            report(done / (prompts * len(makers)))
    full = torch.cat(likely["full", None]) if ("full", None) in likely else None
    rows = []
    for (name, budget), parts in likely.items():
        likelihood = torch.cat(parts)
        chosen = torch.cat(kept[name, budget], dim=1) if (name, budget) in kept else None
        row = _row(TEXT, length, name, budget, prompts) | {"read": round(read[name, budget], 6)}
        from_full = torch.cat(apart[name, budget]) if kept else None
        row |= _text_figures(likelihood, full, from_full, chosen)
        row["log_likelihoods"] = [round(value, 6) for value in likelihood.tolist()]  # to compare runs text by text
        if chosen is not None:
            row["layers"] = layers
            for place, metric in enumerate(METRICS):
                by_head = chosen[..., place].mean(1).tolist()
                row[f"{metric}_by_head"] = [[round(v, 4) for v in layer] for layer in by_head]
        if len(names := list(dict.fromkeys(texts.corpora))) > 1:
            row["by_corpus"] = {}
            for corpus in names:
                own = torch.tensor([each == corpus for each in texts.corpora])
                row["by_corpus"][corpus] = {"prompts": int(own.sum())} | _text_figures(
                    likelihood[own],
                    None if full is None else full[own],
                    None if from_full is None else from_full[own],
                    None if chosen is None else chosen[:, own],
                )
        rows.append(row)
    return rows


def _text_figures(
    likelihood: Tensor, full: Tensor | None, divergence: Tensor | None, metrics: Tensor | None
) -> dict[str, Any]:
    """Return the figures of a method over some prompts.

    Args:
        likelihood, full: mean log-likelihood per prompt, of the method and of full attention.
        divergence: mean Kullback-Leibler divergence of full attention's predictions per prompt.
        metrics: `METRICS`, `[layers, prompts, kv_heads, metrics]`.
    """
    interval = mean(likelihood.tolist())
    perplexity = {side: round(math.exp(-value), 6) for side, value in interval.items()}
    figures = {"perplexity": perplexity | {"low": perplexity["high"], "high": perplexity["low"]}}
    if full is not None:
        # Both losses are of the same texts, so the interval is that of their differences.
        figures["loss_difference"] = mean((full - likelihood).tolist())
    if divergence is not None:
        figures["kl"] = mean(divergence.tolist())
    if metrics is not None:
        for place, metric in enumerate(METRICS):
            figures[metric] = mean(metrics[..., place].mean((0, 2)).tolist())
    return figures


def _row(task: str, length: int, name: str, budget: float | int | None, prompts: int) -> dict[str, Any]:
    return {"task": task, "tokens": length, "method": name, "budget": budget, "prompts": prompts}


def _read(cache: BPCCache, length: int) -> float:
    read, full = cache.kv_bytes(length)
    return read / full
