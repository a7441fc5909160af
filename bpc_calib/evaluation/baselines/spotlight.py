"""Non-linear hashes, trained to rank."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bpc_calib.evaluation.baselines.hashing import BITS, Batch, HashLayer, best, draw, signs
from bpc_calib.evaluation.learning import LayerText

__all__ = ["SpotlightLayer"]

STEPS, QUERIES, PAIRS, KEYS = 300, 64, 64, 1024  # steps; in each: queries, their pairs, and keys of the text
RATE, CLIP = 3e-3, 1.0
TOP = 0.02  # of the keys that a query sees
BETA, ALPHA = 1.0, 3.0  # slope and margin of the ranking loss


class SpotlightLayer(HashLayer):
    """Spotlight Attention (Li et al. 2025): 128 bits from two-layer perceptrons, ranked by equal bits.

    Every query head and every KV head has a perceptron of its own, without biases: `head_dim` to 128 with SiLU, then
    128 to 128, and the signs of the result. A residual connection goes around a layer with as many outputs as inputs.
    Training draws pairs of a key among the 2 % with the largest products of query and key, and another key that the
    query sees. The Bradley-Terry loss asks that the first has a larger score. Signs pass gradients as `x / (1 + |x|)`
    does.

    The paper trains for hours on more text. Here a layer learns from the few texts of an evaluation, so that it takes
    seconds: in 300 steps, each with 64 queries of one text, 64 random pairs per query, and evenly spaced keys, at most
    1,024; the 2 % are of those of them that the query sees. The perceptrons of a group begin alike. The first token is
    always attended: in many heads most attention goes there, and in the loss it is only one of many good keys.
    """

    def score(self, query: Tensor) -> Tensor:
        scores = super().score(query)
        scores[..., 0] = BITS + 1
        return scores

    def hash_queries(self, query: Tensor) -> Tensor:
        own = self.learned[self.index]
        return perceptron(query.unsqueeze(-2), own["query_in"], own["query_out"]).squeeze(-2)

    def hash_keys(self, keys: Tensor) -> Tensor:
        own = self.learned[self.index]
        return perceptron(keys, own["key_in"], own["key_out"])

    @staticmethod
    def learn(text: LayerText, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        kv_heads, head_dim = text.keys.shape[1], text.keys.shape[3]
        group = text.queries.shape[1] // kv_heads
        with torch.inference_mode(False), torch.enable_grad():
            weights = {}
            for part, inputs in (("in", head_dim), ("out", BITS)):
                drawn = torch.randn(kv_heads, inputs, BITS, generator=generator) * (2 / BITS) ** 0.5
                drawn = drawn.to(text.keys.device)
                weights[f"key_{part}"] = drawn.requires_grad_()
                weights[f"query_{part}"] = drawn.detach().unsqueeze(1).repeat(1, group, 1, 1).requires_grad_()
            optimizer = torch.optim.Adam(weights.values(), lr=RATE)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            for _ in range(STEPS):
                batch = draw(text, QUERIES, generator, -(-text.keys.shape[2] // KEYS))
                optimizer.zero_grad()
                ranking_loss(weights, batch, *pairs(batch, generator)).backward()
                torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)
                optimizer.step()
                schedule.step()
        return {name: weight.detach() for name, weight in weights.items()}


def perceptron(vectors: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    """Return `[..., n, BITS]` of `[..., n, head_dim]`, by weights `[..., head_dim, BITS]` and `[..., BITS, BITS]`."""
    hidden = F.silu(vectors @ inner)
    if vectors.shape[-1] == BITS:
        hidden = hidden + vectors
    return hidden @ outer + hidden


def pairs(batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a key among the best and another, for each query: places `[kv_heads, G, n, PAIRS]`.

    Returns:
        Both, and whether they are a pair: the other may happen to be among the best.
    """
    counts, products, places = best(batch, TOP)
    drawn = torch.rand(2, *products.shape[:-1], PAIRS, generator=generator).to(products.device)
    better = places.gather(-1, (drawn[0] * counts[:, None]).long())
    other = (drawn[1] * batch.seen[:, None]).long()
    least = products.gather(-1, (counts[:, None] - 1).expand(*products.shape[:-1], 1))
    return better, other, batch.products.gather(-1, other) < least


def ranking_loss(weights: dict[str, Tensor], batch: Batch, better: Tensor, other: Tensor, counted: Tensor) -> Tensor:
    """Return the mean of `-log sigmoid(BETA * difference - ALPHA)`, of scores that are divided by sqrt(BITS)."""
    query = soft_signs(perceptron(batch.queries, weights["query_in"], weights["query_out"]))
    key = soft_signs(perceptron(batch.keys, weights["key_in"], weights["key_out"]))
    scores = query @ key.mT[:, None] * BITS**-0.5
    difference = scores.gather(-1, better) - scores.gather(-1, other)
    losses = -F.logsigmoid(BETA * difference - ALPHA)
    return (losses * counted).sum() / counted.sum().clamp(min=1)


def soft_signs(hashed: Tensor) -> Tensor:
    """Return the signs, with the gradient of `x / (1 + |x|)`."""
    soft = F.softsign(hashed)
    return soft + (signs(hashed) - soft).detach()
