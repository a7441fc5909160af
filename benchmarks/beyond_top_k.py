"""Ways to spend a budget other than on the best tokens: a sample of the remainder, and numbers by head and step.

    python benchmarks/beyond_top_k.py -m FOLDER -a signs=FILE product=FILE -o beyond_MODEL.json

Every way chooses by exact scores and by the codes of each artifact, with no dense layer, while the last tokens of texts
are forced one by one; the measure is the divergence of the predictions from full attention's. docs/projections.md says
what each way does and what came of it.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import rankings
import report
import torch
from torch import Tensor

from bpc_artifacts import load
from bpc_calib import describe, enable
from bpc_calib.evaluation.baselines import OracleLayer
from bpc_calib.evaluation.comparison import HARD
from bpc_calib.evaluation.evaluate import OTHER_TEXT
from bpc_calib.evaluation.forcing import FullLayer, compare, fork, keep, prefill
from bpc_calib.evaluation.statistics import mean
from bpc_calib.method.scoring import group_scores
from bpc_calib.models.loading import load_model, load_tokenizer
from bpc_calib.runtime.cache import BPCCache
from bpc_calib.runtime.layers import SparseLayer
from bpc_calib.runtime.rules import ranking_defaults
from bpc_calib.text.corpora import open_corpus
from bpc_calib.text.samples import draw_samples

LARGEST_BOOST = 2.0  # logits that a sampled token may gain for those that it stands for
LEAST, MOST = 0.25, 4.0  # tokens of a head and step, in parts of the budget
SPEED = 0.2  # of the threshold's way to the one that keeps the budget on average

Estimate = Callable[[SparseLayer, Tensor, Tensor | None], Tensor]


class ExactLayer(OracleLayer):
    """A layer that estimates logits by the products themselves."""

    def estimates(self, query: Tensor, visible: Tensor | None) -> Tensor:
        return query.float() @ self.keys.float().mT


class SampledMixin:
    """Priority sampling (Duffield, Lund and Thorup 2007): heavy tokens are always chosen, light ones by chance.

    A token's rank in logits plus exponential noise is its priority. The best `k` are attended to; what a token's rank
    is below the best priority left out is added to its logits, up to `LARGEST_BOOST`, so that it stands for others.
    """

    sure = 0.0  # share of the tokens that are the best without any chance

    def attend(self: Any, query: Tensor, k: int | Tensor, visible: Tensor | None, scaling: float | None) -> Tensor:
        self.scaling = self.scaling if scaling is None else scaling
        asked = query.squeeze(2).unflatten(1, (self.keys.shape[1], -1))  # [B, H_KV, G, D]
        heads = asked.shape[2]
        scores = self.estimates(asked, visible) * self.scaling
        weight = group_scores(scores, "relative", limit=16.0) / (5 * heads)  # of a token for the group, in logits
        # torch's generator on a CPU takes 32 bits of a seed.
        seed = random.Random(f"{self.rules.seed}/{self.index}/{self.get_seq_length()}").getrandbits(32)
        drawn = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed))
        noise = -drawn.clamp(min=1e-9).log()
        noise.scatter_(-1, weight.topk(int(self.sure * k), dim=-1).indices, torch.inf)
        best = (weight + noise).topk(k + 1, dim=-1)
        chosen = best.indices[..., :k]
        boost = (best.values[..., k:] - weight.gather(-1, chosen)).clamp(0, LARGEST_BOOST)
        boost = boost.masked_fill(best.values[..., :k].isinf(), 0)
        rows = chosen.unsqueeze(-1).expand(*chosen.shape, self.keys.shape[-1])
        keys, values = (each.gather(2, rows).float() for each in (self.keys, self.values))
        logits = asked.float() @ keys.mT * self.scaling + boost.unsqueeze(-2)
        return (logits.softmax(-1) @ values).to(query.dtype).flatten(1, 2).unsqueeze(1)


class HalfSampledMixin(SampledMixin):
    """Half of the budget for the best tokens, and a sample of the others."""

    sure = 0.5


class ThresholdMixin:
    """As many tokens as have more than a share of the estimated weight, between `LEAST` and `MOST` of the budget.

    The threshold follows the steps, so that a head keeps the budget on average.
    """

    def choose(self: Any, query: Tensor, k: int | Tensor, visible: Tensor | None) -> Tensor:
        weight = (self.estimates(query, visible) * self.scaling).softmax(-1).amax(2)
        if not hasattr(self, "threshold"):
            self.threshold = weight.topk(k, dim=-1).values[..., -1:].log()  # of the first step
            self.taken = self.steps = 0.0
        wanted = (weight.log() > self.threshold).sum(-1, keepdim=True)
        number = wanted.clamp(max(1, int(LEAST * k)), min(int(MOST * k), weight.shape[-1]))
        self.threshold = self.threshold + SPEED * (number / k - 1)
        self.taken, self.steps = self.taken + float((number / k).mean()), self.steps + 1
        best = weight.topk(int(number.max()), dim=-1).indices
        return in_order(best, torch.arange(best.shape[-1]) < number, weight.shape[-1])


class SharedMixin:
    """The tokens with the largest estimated weights of all heads of a layer, with at least `LEAST` for each head."""

    def choose(self: Any, query: Tensor, k: int | Tensor, visible: Tensor | None) -> Tensor:
        weight = (self.estimates(query, visible) * self.scaling).softmax(-1).mean(2)  # [B, H_KV, N]
        least, heads, tokens = max(1, int(LEAST * k)), weight.shape[1], weight.shape[2]
        sure = torch.zeros_like(weight).scatter(-1, weight.topk(least, dim=-1).indices, 1.0)
        best = (weight + 2 * sure).flatten(1).topk(k * heads, dim=-1).indices
        taken = torch.zeros(weight.shape[0], heads * tokens).scatter(-1, best, 1.0).view_as(weight)
        return in_order(torch.arange(tokens).expand_as(taken), taken > 0, tokens)[..., : int(taken.sum(-1).max())]


def in_order(places: Tensor, used: Tensor, tokens: int) -> Tensor:
    """The used places, ascending, with -1 behind them."""
    ordered = torch.where(used, places, tokens).sort(-1).values
    return ordered.masked_fill(ordered == tokens, -1)


WAYS: dict[str, tuple[type, ...]] = {
    "the best": (),
    "sampled": (SampledMixin,),
    "half sampled": (HalfSampledMixin,),
    "by threshold": (ThresholdMixin,),
    "shared by heads": (SharedMixin,),
}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", "-m", default="demo")
    parser.add_argument("--artifacts", "-a", nargs="*", default=[], metavar="NAME=FILE", help="projections by kind")
    parser.add_argument("--held-out", nargs="+", default=["demo"], help="text to decode")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192], help="tokens of a text")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.05, 0.02, 0.01, 0.005])
    parser.add_argument("--forced", type=int, default=64)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2, help="draws of the sample")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    arguments = report.parse(parser, contexts=[256], budgets=[0.1], forced=8, texts=1, seeds=1, held_out=["demo-prose"])
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    enable(model)
    artifacts = {name: load(file) for name, _, file in (each.partition("=") for each in arguments.artifacts)}
    rows = [row for context in arguments.contexts for row in measure(model, tokenizer, artifacts, context, arguments)]
    names = ("ways", "contexts", "budgets", "forced", "texts", "seeds")
    settings = report.settings(arguments, names) | {"largest_boost": LARGEST_BOOST, "least": LEAST, "most": MOST}
    report.write(arguments.output, {"model": describe(model.config).id, "settings": settings, "rows": rows})


def variants(model: Any, artifacts: Any, arguments: Any) -> Iterator[tuple[tuple[Any, ...], Callable[[], BPCCache]]]:
    """The name and a maker of an empty cache for every kind of scores, way, budget and seed."""
    rules = ranking_defaults(None) | HARD
    for kind, artifact in {"exact": None, **artifacts}.items():
        base = ExactLayer if kind == "exact" else rankings.ErrorBoundLayer
        for way in arguments.ways:
            mixin = WAYS[way]
            plain = OracleLayer if kind == "exact" else BPCCache.layer_class
            layer = type("StudiedLayer", (*mixin, base), {}) if mixin else plain
            cache = type("StudiedCache", (BPCCache,), {"layer_class": layer})
            for budget in arguments.budgets:
                for seed in range(arguments.seeds if way.endswith("sampled") else 1):
                    yield (
                        (kind, way, budget, seed),
                        partial(cache, model.config, artifact, budget=budget, seed=seed, **rules),
                    )


def measure(model: Any, tokenizer: Any, artifacts: Any, context: int, arguments: Any) -> Iterator[dict[str, Any]]:
    """A row for every kind, way and budget at one length."""
    texts, _ = draw_samples(
        [open_corpus(spec) for spec in arguments.held_out],
        tokenizer,
        samples=arguments.texts * len(arguments.held_out),
        sequence_length=max(arguments.contexts),
        seed=OTHER_TEXT,
        vocab_size=describe(model.config).vocab_size,
    )
    texts = texts[:, -context:]
    full = type("FullCache", (BPCCache,), {"layer_class": FullLayer})
    prefix, tail = prefill(model, texts[:, : -arguments.forced]), texts[:, -arguments.forced :]
    exactly = partial(full, model.config, budget=1.0, dense_layers=())
    predicted = keep(model, fork(prefix, exactly()), tail)
    likely, _ = compare(model, fork(prefix, exactly()), tail, predicted)
    found: dict[tuple[Any, ...], list[tuple[Tensor, Tensor, float]]] = {}
    for (*name, seed), make in variants(model, artifacts, arguments):
        cache = fork(prefix, make())
        likelihood, apart = compare(model, cache, tail, predicted)
        taken = [layer.taken / layer.steps for layer in cache.layers if hasattr(layer, "taken")]
        found.setdefault(tuple(name), []).append((likelihood, apart, sum(taken) / len(taken) if taken else 1.0))
        print(
            context,
            *name,
            seed,
            f"KL {float(apart.mean()):.4f} loss {float((likely - likelihood).mean()):.4f}",
            flush=True,
        )
    for (kind, way, budget), parts in found.items():
        losses, aparts = (
            torch.stack(each) for each in ([likely - part[0] for part in parts], [part[1] for part in parts])
        )
        row = {"tokens": context, "scores": kind, "way": way, "budget": budget}
        row |= {"kl": mean(aparts.mean(0).tolist()), "loss_difference": mean(losses.mean(0).tolist())}
        row["taken"] = round(sum(part[2] for part in parts) / len(parts), 4)
        if len(parts) > 1:
            row["kl_between_seeds"] = round(float(aparts.mean(1).std()), 6)
        yield row


if __name__ == "__main__":
    main()
