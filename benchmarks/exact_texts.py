"""Texts with drafts beside full attention's: are they the same?

    python benchmarks/exact_texts.py -m build/real/SmolLM2-135M-Instruct \\
        -a build/real/SmolLM2-135M-Instruct-bpc.safetensors --corpus prose=build/real/text/held-out/prose

`real_suite.py` has its models decode here too, and counts how many drafts were right, and how fast it is.
"""

import functools
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import report
import torch
from torch import Tensor

import bpc_artifacts
from bpc_artifacts import ProjectionArtifact
from bpc_calib import BPCCache, enable, exact_decoding
from bpc_calib.compat import with_cache
from bpc_calib.evaluation.forcing import fork, predictions, prefill
from bpc_calib.models.loading import load_model, load_tokenizer
from bpc_calib.text.corpora import open_corpora
from bpc_calib.text.samples import draw_samples

__all__ = ["compared_text"]

EVERYTHING = 1 << 40  # tokens from which a cache chooses: it never does
BUDGET = 0.02
DRAFT = 4
TURNS = 3


class Made(NamedTuple):
    """A text, and how it came."""

    tokens: Tensor  # int64, the new ones
    speed: float  # tokens per second behind the first one
    cache: BPCCache


class Stamps:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def main() -> None:
    """Decode texts behind several prompts, and write a row for each with each length of drafts."""
    parser = report.make_parser(__doc__)
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("-a", "--artifact", required=True, help="projections of the model")
    parser.add_argument("--corpus", action="append", help="of the prompts; default: the bundled text")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new", type=int, default=2560, help="tokens of each text")
    parser.add_argument("--drafts", default="2,4,8,adaptive", help="tokens drafted at once")
    asked = parser.parse_args()
    if asked.tiny:
        asked.prompts, asked.new = 1, 8
    model, tokenizer = load_model(asked.model, dtype=asked.dtype), load_tokenizer(asked.model)
    enable(model)
    corpora, artifact = open_corpora(asked.corpus or ["demo-prose", "demo-code"]), bpc_artifacts.load(asked.artifact)
    about = {"samples": asked.prompts, "sequence_length": asked.prompt_tokens, "seed": 0}
    texts, _ = draw_samples(corpora, tokenizer, vocab_size=model.config.vocab_size, **about)
    drafts = [None if each == "adaptive" else int(each) for each in asked.drafts.split(",")]
    rows = []
    for text in texts:
        for row in same_as_full(model, artifact, text.long().unsqueeze(0), asked.new, drafts):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    report.keep(asked.output, report.about() | {"dtype": asked.dtype, "budget": BUDGET, "rows": rows})


def decoded(model: Any, ids: Tensor, cache: BPCCache, new: int, **exact: Any) -> Made:
    """Decode `new` greedy tokens behind `ids [1, T]`, of which the cache holds all but the last.

    Args:
        exact: arguments of `exact_decoding`; none: without drafts.
    """
    stamps = Stamps()
    how: dict[str, Any] = {"streamer": stamps}
    if exact:
        how = {"custom_generate": functools.partial(exact_decoding, streamer=stamps), **exact}
    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        **with_cache(cache), **how,
    )  # fmt: skip
    times = stamps.times[-new:]  # the first call may be of the prompt
    return Made(text[0, ids.shape[1] :], (new - 1) / (times[-1] - times[0]), cache)


def compared_text(
    model: Any, artifact: ProjectionArtifact, ids: Tensor, new: int, budgets: Sequence[float]
) -> list[dict[str, Any]]:
    """Decode one text with drafts, a row for each budget; the first also says how fast full attention and BPC are.

    Speeds at the first budget are medians of some turns. `full` runs BPC's kernel, which is faster than transformers'
    attention; `adaptive` decides how much to draft.
    """
    prefix = prefill(model, ids[:, :-1])

    def made(budget: float, *, full: bool = False, **exact: Any) -> Made:
        cache = copied(prefix, BPCCache(model.config, artifact, budget=budget, min_tokens=1, min_context=0))
        with cache.full_attention(full):
            return decoded(model, ids, cache, new, **exact)

    ways: dict[str, Any] = {"exact": {"draft": DRAFT}, "full": {"full": True}, "bpc": {}, "adaptive": {"draft": None}}
    made(budgets[0], draft=DRAFT)  # what runs for the first time is slower
    turns = [{name: made(budgets[0], **how) for name, how in ways.items()} for _ in range(TURNS)]
    full, rows = turns[0]["full"], list[report.Row]()
    for budget in budgets:
        fixed = made(budget, draft=DRAFT) if rows else turns[0]["exact"]
        found, speeds = fixed.cache.agreement, {"exact": fixed.speed}
        if not rows:
            speeds = {name: median(turn[name].speed for turn in turns) for name in ways}
        about = {"tokens": ids.shape[1], "new": new, "budget": budget, "same": same(fixed, full)}
        counts = {"checked": found.checked, "right": found.agreed, "kl": found.divergence, "ties": found.ties}
        rows.append(about | counts | {"tokens_per_second": speeds})
    return rows


def same(one: Made, other: Made) -> int:
    """How many tokens of two texts are the same before the first that differs."""
    differs = (one.tokens != other.tokens).nonzero()
    return int(differs[0]) if len(differs) else len(one.tokens)


def same_as_full(
    model: Any, artifact: ProjectionArtifact, ids: Tensor, new: int, drafts: Sequence[int | None]
) -> list[dict[str, Any]]:
    """Decode one long text with drafts of several lengths; a row for each says how far it is full attention's.

    Where they differ, `not_best` counts the tokens that are not the most likely ones of full attention after the same
    text, one token at a time, which rounding explains; `largest_gap` is that of their logarithms of probability.
    """
    prefix = prefill(model, ids[:, :-1])

    def cached(least: int) -> BPCCache:
        return copied(prefix, BPCCache(model.config, artifact, budget=BUDGET, min_tokens=1, min_context=least))

    full, rows = decoded(model, ids, cached(EVERYTHING), new), list[report.Row]()
    for draft in drafts:
        made = decoded(model, ids, cached(0), new, draft=draft)
        found = made.cache.agreement
        alike = same(made, full)
        row: report.Row = {"draft": draft, "new": new, "same": alike, "checked": found.checked, "right": found.agreed}
        if alike < new:
            gaps = gaps_of(model, torch.cat([ids[:, -1:], made.tokens.unsqueeze(0)], 1), cached(EVERYTHING))
            row |= {"not_best": sum(gap > 0 for gap in gaps), "largest_gap": max(gaps)}
        rows.append(row)
    return rows


@torch.inference_mode()
def copied(prefix: Any, cache: BPCCache) -> BPCCache:
    """Return the empty cache with the tokens of a prefix."""
    return fork(prefix, cache)


@torch.inference_mode()
def gaps_of(model: Any, text: Tensor, cache: BPCCache) -> list[float]:
    """Return by how much the logarithm of each token's probability is below that of the most likely one."""
    return [float(each.max() - each.gather(-1, wanted)) for each, wanted in predictions(model, cache, text)]


if __name__ == "__main__":
    main()
