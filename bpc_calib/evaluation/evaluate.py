"""Methods compared on the same prompts at the same budget: needles and other tasks, and plain text."""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bpc_artifacts import ProjectionArtifact
from bpc_calib.errors import InputError
from bpc_calib.evaluation.compared_cache import make_cache
from bpc_calib.evaluation.fidelity import METRICS, probe
from bpc_calib.evaluation.forcing import complete, fork, log_likelihoods, prefill
from bpc_calib.evaluation.methods import METHODS, variants
from bpc_calib.evaluation.prompts import Prompt, count_answer, hide
from bpc_calib.evaluation.statistics import mean, share
from bpc_calib.evaluation.tasks import TASKS, TEXT, Problem, score
from bpc_calib.method.selection import attended
from bpc_calib.models.description import describe
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.runtime.rules import ranking_defaults
from bpc_calib.text.known_corpora import Corpus
from bpc_calib.text.samples import draw_samples

__all__ = ["DEPTHS", "HARD", "Answers", "ask", "check", "draw_prompts", "evaluate", "hide_all"]

FORCED = 64  # tokens of each text that are decoded one at a time
DEPTHS = 10  # needles stand in the middle of each tenth
BATCH_TOKENS = 1 << 16
OTHER_TEXT = 1 << 32  # added to the seed, so that made text is not that of a calibration with the same seed

# No dense layer and no lower bound, so that every layer has to choose: the setting that tells methods apart.
HARD: dict[str, Any] = {"dense_layers": (), "min_tokens": 1}

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class _Setting:
    """What all tasks share."""

    model: Any
    tokenizer: Any
    artifact: ProjectionArtifact | None
    methods: Sequence[str]
    budgets: Sequence[float | int]
    rules: dict[str, Any]

    def caches(self) -> dict[tuple[str, float | int | None], Callable[[], BPCCache]]:
        """How to make an empty cache of every variant."""
        return {
            (name, budget): functools.partial(make_cache, name, self.model.config, self.artifact, budget, **self.rules)
            for name, budget in variants(self.methods, self.budgets)
        }


def evaluate(
    model: Any,
    tokenizer: Any,
    artifact: ProjectionArtifact | None = None,
    *,
    tasks: Sequence[str] = (TEXT, "needle"),
    lengths: Sequence[int] = (2048,),
    budgets: Sequence[float | int] = (0.02, 0.005),
    methods: Sequence[str] | None = None,
    prompts: int = 20,
    corpora: Sequence[Corpus] = (),
    seed: int = 0,
    batch: int | None = None,
    progress: Progress = lambda share, what: None,
    **rules: Any,
) -> list[dict[str, Any]]:
    """Compare methods with full attention; every token that is judged is decoded in a step of its own.

    The prefix of a prompt is computed once, densely, and copied to every method. A task's question is fed token by
    token, then the answer is decoded greedily. `TEXT` takes pieces of the corpora and forces the last 64 tokens of
    each: perplexity, and what each method's choice keeps of full attention (`measure`).

    Args:
        model: one that `bpc_calib.enable` has enabled.
        artifact: projections of the method `bpc`; without, that method is left out.
        tasks: names of `bpc_calib.evaluation.tasks.TASKS`, and `TEXT`.
        lengths: tokens of a prompt, its question and answer included.
        budgets: shares of the tokens, or numbers of them.
        methods: names of `METHODS`; all if None.
        prompts: of each task and length.
        corpora: where `TEXT` comes from; it needs at least one.
        batch: prompts at once; what 65,536 tokens hold if None.
        progress: called with the share that is done, and what is being done.
        rules: of `BPCCache`; `HARD` are good ones to tell methods apart.

    Returns:
        A row for each task, length, method and budget: figures are tables of `value`, `low` and `high`, of a 95 %
        interval. `read` is the share of the KV bytes that a step reads.

    Raises:
        InputError: an unknown task or method, a prompt longer than the model's limit, or a budget that leaves
            nothing to choose; says which.
    """
    chosen = check(model.config, artifact, tasks, lengths, budgets, methods, prompts, corpora, **rules)
    setting = _Setting(model, tokenizer, artifact, chosen, tuple(budgets), rules)
    vocabulary = describe(model.config).vocab_size
    texts = {
        length: draw_samples(
            list(corpora),
            tokenizer,
            samples=prompts,
            sequence_length=length,
            seed=seed + OTHER_TEXT,
            vocab_size=vocabulary,
        )[0]
        for length in (lengths if TEXT in tasks else ())
    }
    steps = [(length, task) for length in lengths for task in tasks]
    asked = {
        (length, task): draw_prompts(task, tokenizer, length, prompts, seed) for length, task in steps if task != TEXT
    }
    rows = []
    for number, (length, task) in enumerate(steps):
        many = batch or max(1, BATCH_TOKENS // length)

        def report(part: float, number: int = number, length: int = length, task: str = task) -> None:
            progress((number + part) / len(steps), f"{task}, {length:,} tokens")

        report(0.0)
        if task == TEXT:
            rows += _text(setting, texts[length], many, report)
        else:
            rows += _task(setting, task, length, asked[length, task], many, report)
    progress(1.0, "done")
    return rows


def check(
    config: Any,
    artifact: ProjectionArtifact | None,
    tasks: Sequence[str],
    lengths: Sequence[int],
    budgets: Sequence[float | int],
    methods: Sequence[str] | None,
    prompts: int,
    corpora: Sequence[Corpus],
    **rules: Any,
) -> tuple[str, ...]:
    """The methods that `evaluate` will compare with these arguments; raises what it would, before any work."""
    able = tuple(name for name, method in METHODS.items() if artifact is not None or not method.calibrated)
    chosen = able if methods is None else tuple(dict.fromkeys(methods))
    for task in tasks:
        if task != TEXT and task not in TASKS:
            raise InputError(f"unknown task {task!r}: the tasks are {', '.join([TEXT, *TASKS])}")
    for name in chosen:
        if name not in METHODS:
            raise InputError(f"unknown method {name!r}: the methods are {', '.join(METHODS)}")
        if name not in able:
            raise InputError(f"method {name!r} needs an artifact of this model; bpc-online needs none")
        for budget in budgets:
            make_cache(name, config, artifact, budget, **rules)
    for given, what in ((lengths, "length"), (budgets, "budget"), (chosen, "method")):
        if not given:
            raise InputError(f"give at least one {what}")
    if prompts < 1:
        raise InputError(f"prompts must be at least 1, not {prompts}")
    if TEXT in tasks and not corpora:
        raise InputError(f"task {TEXT!r} needs a corpus")
    limit = describe(config).context_limit
    recent = rules.get("recent", ranking_defaults(artifact)["recent"])
    for length in lengths if tasks else ():
        if length < 1:
            raise InputError(f"prompts must have at least 1 token, not {length}")
        if limit is not None and length > limit:
            raise InputError(f"prompts of {length:,} tokens: the model takes {limit:,} in all")
        if TEXT in tasks and length < 2 * FORCED:
            raise InputError(f"task {TEXT!r} needs at least {2 * FORCED} tokens, not {length}")
        for budget in budgets:
            k = attended(length, budget, rules.get("min_tokens", 128))
            for name in chosen:
                forced = max(METHODS[name].forced, recent)
                if METHODS[name].takes_budget and k <= forced:
                    raise InputError(
                        f"a budget of {budget} is {k} of {length:,} tokens, and {METHODS[name].label} attends to "
                        f"{forced} whatever it ranks: nothing is left to choose"
                    )
    return chosen


def draw_prompts(task: str, tokenizer: Any, length: int, prompts: int, seed: int) -> list[Prompt]:
    """Prompts of a task, the same for the same seed; needles stand at `DEPTHS` in turn."""
    drawn = [random.Random(f"{seed}/{task}/{length}/{number}") for number in range(prompts)]
    problems = [TASKS[task](rng) for rng in drawn]
    depths = [(number % DEPTHS + 0.5) / DEPTHS if task == "needle" else None for number in range(prompts)]
    try:
        return hide_all(problems, tokenizer, length, drawn, depths)
    except InputError as fault:
        raise InputError(f"task {task!r} at {length:,} tokens: {fault}") from fault


def _task(
    setting: _Setting, task: str, length: int, asked: Sequence[Prompt], batch: int, report: Callable[[float], None]
) -> list[dict[str, Any]]:
    """Rows of one task at one length."""
    prompts, problem = len(asked), asked[0].problem
    counted = all(len(prompt.problem.wanted) == 1 for prompt in asked)
    rows = []
    for (name, budget), found in ask(setting.model, setting.tokenizer, asked, setting.caches(), batch, report).items():
        figure = share(sum(found.scores), prompts) if counted else mean(found.scores, least=0.0, most=1.0)
        row = _row(task, length, name, budget, prompts) | {"score": figure, "read": round(found.read, 6)}
        row["example"] = {"fact": problem.statements[0], "question": problem.question, "said": found.said[0]}
        if task == "needle":
            places = [found.scores[place::DEPTHS] for place in range(min(DEPTHS, prompts))]
            row["depths"] = [share(sum(part), len(part)) for part in places]
        rows.append(row)
    return rows


def hide_all(
    problems: Sequence[Problem],
    tokenizer: Any,
    length: int,
    drawn: Sequence[random.Random],
    depths: Sequence[float | None],
    style: str | None = None,
) -> list[Prompt]:
    """Prompts that all leave room in `length` tokens for the longest answer."""
    new = max(count_answer(problem, tokenizer) for problem in problems)
    return [
        hide(problem, tokenizer, length - new, rng, depth, style=style)
        for problem, rng, depth in zip(problems, drawn, depths, strict=True)
    ]


@dataclass
class Answers:
    """What a method said to each prompt, how right it was, and the share of the KV bytes that its last step read."""

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
    """Ask prompts of one length, and decode each answer with an empty cache of every maker."""
    answers = {key: Answers() for key in makers}
    length, new = len(asked[0].ids), max(prompt.answer for prompt in asked)
    for first in range(0, len(asked), batch):
        some = asked[first : first + batch]
        ids = torch.tensor([prompt.ids for prompt in some], device=model.device)
        # Up to the longest question of the batch: where one is shorter, text before it is forced too.
        cut = length - max(prompt.question for prompt in some)
        prefix = prefill(model, ids[:, :cut])
        for number, (key, make) in enumerate(makers.items(), start=1):
            cache, own = fork(prefix, make()), answers[key]
            said = complete(model, cache, ids[:, cut:], new)
            texts = [tokenizer.decode(row, skip_special_tokens=True) for row in said.tolist()]
            own.said += texts
            own.scores += [score(prompt.problem, text) for prompt, text in zip(some, texts, strict=True)]
            own.read = _read(cache, length + new)
            report((first + len(some) * number / len(makers)) / len(asked))
    return answers


def _text(setting: _Setting, texts: Tensor, batch: int, report: Callable[[float], None]) -> list[dict[str, Any]]:
    """Rows of plain text `[prompts, tokens]`: perplexity, and what each choice keeps."""
    prompts, length = texts.shape
    makers = setting.caches()
    likely: dict[Any, list[Tensor]] = {key: [] for key in makers}
    kept: dict[Any, list[Tensor]] = {key: [] for key in makers if METHODS[key[0]].takes_budget}
    read: dict[Any, float] = {}
    chosen: list[int] = []
    done = 0
    for some in texts.split(batch):
        some = some.to(setting.model.device)
        prefix = prefill(setting.model, some[:, :-FORCED])
        tail = some[:, -FORCED:]
        if kept:
            asked = probe(setting.model.config, {key: makers[key]() for key in kept})
            log_likelihoods(setting.model, fork(prefix, asked), tail)
            chosen = asked.asked_layers()
            for key, found in asked.found().items():
                kept[key].append(found)
        for key, make in makers.items():
            cache = fork(prefix, make())
            likely[key].append(log_likelihoods(setting.model, cache, tail)[0].double().mean(-1).cpu())
            read[key] = _read(cache, length)
            done += len(some)
            report(done / (prompts * len(makers)))
    full = torch.cat(likely["full", None]) if ("full", None) in likely else None
    rows = []
    for (name, budget), parts in likely.items():
        own = torch.cat(parts)
        row = _row(TEXT, length, name, budget, prompts) | {"read": round(read[name, budget], 6)}
        row["perplexity"] = {side: round(float(torch.tensor(-v).exp()), 6) for side, v in mean(own.tolist()).items()}
        row["perplexity"]["low"], row["perplexity"]["high"] = row["perplexity"]["high"], row["perplexity"]["low"]
        if full is not None:
            # Of the same texts, so the interval is that of the differences.
            row["loss_difference"] = mean((full - own).tolist())
        if (name, budget) in kept:
            found = torch.cat(kept[name, budget], dim=1)  # [layers, prompts, kv_heads, metrics]
            row["layers"] = chosen
            for place, metric in enumerate(METRICS):
                row[metric] = mean(found[..., place].mean((0, 2)).tolist())
                row[f"{metric}_by_head"] = [
                    [round(v, 4) for v in layer] for layer in found[..., place].mean(1).tolist()
                ]
        rows.append(row)
    return rows


def _row(task: str, length: int, name: str, budget: float | int | None, prompts: int) -> dict[str, Any]:
    return {"task": task, "tokens": length, "method": name, "budget": budget, "prompts": prompts}


def _read(cache: BPCCache, length: int) -> float:
    read, full = cache.kv_bytes(length)
    return read / full
