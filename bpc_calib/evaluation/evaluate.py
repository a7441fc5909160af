"""Compare methods on the same prompts with the same budget: needles and other tasks, and plain text."""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.evaluation.comparison import Comparison, check, learners, make_cache
from bpc_calib.evaluation.decoded import Batch, Finished, decode, steps
from bpc_calib.evaluation.fidelity import METRICS
from bpc_calib.evaluation.learning import Learned
from bpc_calib.evaluation.methods import Variant
from bpc_calib.evaluation.prompts import DEPTHS, Prompt, draw_prompts, make_frame
from bpc_calib.evaluation.statistics import mean, proportion
from bpc_calib.evaluation.tasks import TEXT, score
from bpc_calib.models.description import describe
from bpc_calib.text.samples import beginning, draw_samples

__all__ = ["Texts", "draw_texts", "evaluate"]

BATCH_TOKENS = 1 << 16
OTHER_TEXT = 1 << 32  # added to the seed, so that made text differs from that of a calibration with the same seed

Progress = Callable[[float, str], None]
Texts = tuple[Tensor, list[str]]  # of `TEXT`: int64 `[prompts, longest length]`, and the corpus of each
logger = logging.getLogger("bpc_calib")


def evaluate(
    model: Any,
    tokenizer: Any,
    artifact: ProjectionArtifact | None = None,
    comparison: Comparison = Comparison(),  # noqa: B008  it is frozen
    *,
    texts: Texts | None = None,
    learned: Mapping[str, Learned] = MappingProxyType({}),
    finished: Finished | None = None,
    progress: Progress = lambda share, what: None,
) -> list[dict[str, Any]]:
    """Compare methods with full attention; every measured token is one decoding step.

    The prefix of a prompt is computed once, densely, and copied to every method. A task's question is fed token by
    token, then the answer is decoded greedily. `TEXT` forces the last tokens of texts from the corpora, the same at
    every length, and measures perplexity, the divergence of the predictions from full attention's, and the part of full
    attention that each method's choice keeps (`FullAttention.kept`).

    A warning names what cannot be computed, such as a budget that leaves nothing to choose; the rest is.

    Args:
        model: an enabled model (`bpc_calib.enable`).
        artifact: projections of the method `bpc`; None: leave this method out.
        comparison: methods, prompts and settings.
        texts: what `draw_texts` returns, where that was called before the model was loaded.
        learned: the first of what `learn_methods` returns, for the methods that learn from text beforehand.
        finished: parts that an earlier call with this model, artifact and rules has computed, by names that say of what
            they are; new ones are put in as soon as they are computed. Values are what JSON can hold.
        progress: called with the finished share and a description of the current work.

    Returns:
        One row per task, length, method and budget. Metrics are dictionaries of `value`, `low` and `high`, with a 95 %
        interval. `read` is the share of the KV bytes that a step reads. With several corpora, `by_corpus` holds the
        metrics of `TEXT` for each. `log_likelihoods` has the mean over the forced tokens of each text.

    Raises:
        InputError: a task or method is unknown, has not learned, or nothing can be computed; the message names it.
        CorpusError: a corpus cannot be read, or has too little text.
    """
    methods, cells = check(model.config, artifact, comparison)
    for name in learners(methods).keys() - learned.keys():
        raise InputError(f"method {name!r} learns from text: pass what learn_methods of the module comparison returns")
    finished = {} if finished is None else finished
    prompts = _draw_prompts(list(cells), tokenizer, comparison)
    ids, corpora = draw_texts(model.config, tokenizer, comparison, cells) if texts is None else texts
    batches: dict[tuple[int, str], list[Batch]] = {}
    for length, task in cells:
        size = comparison.batch or max(1, BATCH_TOKENS // length)
        if task == TEXT:
            # The same last tokens at every length, so that only the context differs.
            start = len(beginning(tokenizer))
            cut = torch.cat([ids[:, :start], ids[:, start - length :]], dim=1)
            batches[length, task] = [Batch(task, part, length - comparison.forced, 0) for part in cut.split(size)]
        elif (length, task) in prompts:
            batches[length, task] = _batches(task, prompts[length, task], size)

    def left() -> float:
        return sum(steps(batch, cells[cell], finished) for cell, own in batches.items() for batch in own)

    all_steps, rows = left() or 1.0, []
    for (length, task), own in batches.items():

        def report(what: str = f"{task}, {length:,} tokens") -> None:
            progress(1 - left() / all_steps, what)

        report()
        makers = {
            (name, budget): functools.partial(
                make_cache, name, model.config, artifact, budget, learned.get(name), **comparison.rules
            )
            for name, budget in cells[length, task]
        }
        for batch in own:
            decode(model, tokenizer, batch, makers, finished, report)
        if task == TEXT:
            rows += _text_rows(own, list(makers), finished, corpora)
        else:
            rows += _task_rows(own, list(makers), finished, prompts[length, task])
    progress(1.0, "done")
    return rows


def draw_texts(
    config: Any, tokenizer: Any, comparison: Comparison, cells: Mapping[tuple[int, str], Sequence[Variant]]
) -> Texts:
    """Return the texts of `TEXT`, none where no length of it is compared. They need no weights.

    Args:
        config: `model.config`.
        tokenizer: the tokenizer of the model.
        comparison: the corpora, the number of texts and the seed.
        cells: what `check` returns for it.

    Raises:
        CorpusError: a corpus cannot be read, or has too little text.
        ModelError: the tokenizer does not belong to the model.
    """
    lengths = [length for length, task in cells if task == TEXT]
    if not lengths:
        return torch.empty(0, 0), []
    tokens, sources = draw_samples(
        list(comparison.corpora),
        tokenizer,
        samples=comparison.prompts,
        sequence_length=max(lengths),
        seed=comparison.seed + OTHER_TEXT,
        vocab_size=describe(config).vocab_size,
    )
    return tokens, [source["name"] for source in sources for _ in range(source["samples"])]


def _draw_prompts(
    cells: Sequence[tuple[int, str]], tokenizer: Any, comparison: Comparison
) -> dict[tuple[int, str], list[Prompt]]:
    """Return the prompts of each length and task with a question; a warning names those that need longer prompts."""
    asked = [(length, task) for length, task in cells if task != TEXT]
    frame = make_frame(tokenizer, comparison.raw) if asked else None
    drawn, faults = {}, []
    for length, task in asked:
        try:
            drawn[length, task] = draw_prompts(task, tokenizer, length, comparison.prompts, comparison.seed, frame)
        except InputError as fault:
            faults.append(fault)
    if faults and len(faults) == len(cells):
        raise faults[0]
    for each in faults:
        logger.warning("skipped: %s", each)
    return drawn


def _batches(task: str, prompts: Sequence[Prompt], size: int) -> list[Batch]:
    new = max(prompt.answer for prompt in prompts)
    batches = []
    for first in range(0, len(prompts), size):
        part = prompts[first : first + size]
        ids = torch.tensor([prompt.ids for prompt in part])
        # Cut before the longest question of the batch; with a shorter question, text before it is forced too.
        batches.append(Batch(task, ids, ids.shape[1] - max(prompt.question for prompt in part), new))
    return batches


def _task_rows(
    batches: Sequence[Batch], variants: Sequence[Variant], finished: Finished, prompts: Sequence[Prompt]
) -> list[dict[str, Any]]:
    """Return the rows of one task at one length."""
    count, problem = len(prompts), prompts[0].problem
    all_or_nothing = all(len(prompt.problem.wanted) == 1 for prompt in prompts)
    rows = []
    for variant in variants:
        parts = [finished[batch.answers(variant)] for batch in batches]
        texts = [text for part in parts for text in part["texts"]]
        own = [score(prompt.problem, text) for prompt, text in zip(prompts, texts, strict=True)]
        figure = proportion(sum(own), count) if all_or_nothing else mean(own, least=0.0, most=1.0)
        row = _row(batches[0], variant, count) | {"score": figure, "read": parts[-1]["read"]}
        asked = problem.question + problem.start
        row["example"] = {"fact": problem.statements[0], "question": asked, "said": texts[0]}
        if batches[0].task == "needle":
            by_depth = [own[place::DEPTHS] for place in range(min(DEPTHS, count))]
            row["depths"] = [proportion(sum(each), len(each)) for each in by_depth]
        rows.append(row)
    return rows


def _text_rows(
    batches: Sequence[Batch], variants: Sequence[Variant], finished: Finished, corpora: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the rows of plain text: perplexity, and the metrics of each method's choice."""

    def answered(variant: Variant, what: str) -> Tensor:
        return torch.tensor([v for b in batches for v in finished[b.answers(variant)][what]], dtype=torch.float64)

    rows = []
    for variant in variants:
        likelihood = answered(variant, "likelihood")
        values = {}  # of each prompt
        if ("full", None) in variants:
            # Both losses are of the same texts, so the interval is that of their differences.
            values["loss_difference"] = answered(("full", None), "likelihood") - likelihood
        if finished[batches[0].answers(variant)].get("agreement") is not None:
            values |= {"kl": answered(variant, "divergence"), "agreement": answered(variant, "agreement")}
        row = _row(batches[0], variant, len(likelihood)) | {"read": finished[batches[-1].answers(variant)]["read"]}
        row["log_likelihoods"] = [round(value, 6) for value in likelihood.tolist()]  # to compare runs text by text
        if batches[0].choices(variant) in finished:
            found = [finished[batch.choices(variant)] for batch in batches]
            row["layers"] = found[0]["layers"]
            # [layers, prompts, kv_heads, metrics]
            chosen = torch.cat([torch.tensor(each["kept"], dtype=torch.float64) for each in found], dim=1)
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


def _row(batch: Batch, variant: Variant, prompts: int) -> dict[str, Any]:
    tokens = batch.ids.shape[1] + batch.new
    return {"task": batch.task, "tokens": tokens, "method": variant[0], "budget": variant[1], "prompts": prompts}
