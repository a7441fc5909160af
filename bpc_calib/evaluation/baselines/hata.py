"""Linear hashes, trained on labels of similarity."""

import torch
from torch import Tensor

from bpc_calib.evaluation.baselines.hashing import BITS, Batch, HashLayer, best, draw
from bpc_calib.evaluation.learning import LayerText

__all__ = ["HataLayer"]

STEPS, SAME, QUERIES = 500, 25, 32  # steps; as many with the same queries; queries
RATE, MOMENTUM, WEIGHT_DECAY, DECAY = 0.1, 0.9, 1e-6, 0.998
TOP, LARGEST, SMALLEST, OTHERS = 0.1, 20.0, 1.0, -1.0  # share of the similar keys, their labels, and the others' label
SIGMA, EPSILON, LAMBDA, ETA = 0.1, 0.01, 1.0, 1.0


class HataLayer(HashLayer):
    """HATA (Gong et al. 2025): 128 bits from one linear map per KV head, ranked by equal bits.

    The map hashes the keys and the queries of its group. It learns from triples of a query, a key that it sees, and a
    label: of the 10 % of the keys with the largest products the labels fall linearly from 20 to 1, all other keys have
    the label -1. With `h(x) = 2 sigmoid(0.1 x W) - 1` in place of signs, the loss is the sum of three terms: 0.01 times
    the mean of `label |h(q) - h(k)|^2`; the square of the mean of `h(q) + h(k)` divided by 128, so that bits are
    balanced; and `|W^T W - I|` of all KV heads together, so that bits differ. That could not reach 0 where `head_dim`
    is below 128, so there it is `|W W^T - I|`; the authors' code takes 128 alone.

    The numbers and the labels are those of the authors' code: 500 steps of SGD, of which 25 in a row use the same
    triples, some 65,000 per query head. Theirs are of one query of each long text; here texts are few, and the triples
    are those of 32 queries of one text, at most 65,000. Their code prepares a decay of the learning rate, 0.998,
    without using it; here it follows each step. Weights are float32, not bfloat16.
    """

    def hash_queries(self, query: Tensor) -> Tensor:
        return query @ self.learned[self.index]["weight"]

    def hash_keys(self, keys: Tensor) -> Tensor:
        return keys @ self.learned[self.index]["weight"]

    @staticmethod
    def learn(text: LayerText, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode(False), torch.enable_grad():
            drawn = torch.randn(text.keys.shape[1], text.keys.shape[3], BITS, generator=generator)
            weight = drawn.to(text.keys.device).requires_grad_()
            optimizer = torch.optim.SGD([weight], lr=RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
            for step in range(STEPS):
                if step % SAME == 0:
                    batch = draw(text, QUERIES, generator)
                    label = labels(batch)
                optimizer.zero_grad()
                hash_loss(weight, batch, label).backward()
                optimizer.step()
                schedule.step()
        return {"weight": weight.detach()}


def labels(batch: Batch) -> Tensor:
    """Return how similar each key should be to each query: float32 `[kv_heads, G, n, N]`; 0: not seen."""
    counts, _, places = best(batch, TOP)
    rank = torch.arange(places.shape[-1], device=places.device)
    falling = LARGEST - (LARGEST - SMALLEST) * rank / (counts[:, None] - 1).clamp(min=1)
    falling = torch.where(rank < counts[:, None], falling, OTHERS)
    found = torch.full_like(batch.products, OTHERS).scatter_(-1, places, falling.expand(places.shape))
    return found.masked_fill_(batch.products.isinf(), 0)


def hash_loss(weight: Tensor, batch: Batch, label: Tensor) -> Tensor:
    """Return the loss of weights `[kv_heads, head_dim, BITS]`, as a sum over heads."""
    query, key = (torch.tanh(SIGMA / 2 * (x @ weight)) for x in (batch.queries.flatten(1, 2), batch.keys))
    query = query.unflatten(1, batch.queries.shape[1:3])  # tanh(x / 2) is 2 sigmoid(x) - 1
    items = batch.seen.sum()  # pairs of a query and a key that it sees, of each query head
    squares = query.square().sum(-1, keepdim=True) + key.square().sum(-1)[:, None, None]
    similarity = (label * (squares - 2 * query @ key.mT[:, None])).sum() / items
    times = (torch.arange(key.shape[1], device=key.device) < batch.seen[:, None]).sum(0)  # that a key is seen
    total = (query * batch.seen[:, None]).sum(2) + (key * times[:, None]).sum(1, keepdim=True)
    balance = (total / items / BITS).square().sum()
    shorter = weight.mT if weight.shape[-2] < BITS else weight
    products = shorter.mT @ shorter
    difference = products - torch.eye(len(products[0]), device=weight.device)
    return EPSILON * similarity + LAMBDA * balance + ETA * difference.norm()
