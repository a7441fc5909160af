"""The masked reference: full attention with everything outside the selected set masked out.

It follows only the definitions in docs/generating.md, in float64 and without speed: plain transformers caches, one
sequence and KV head at a time, and the literal algorithms for codes, scores and the set. It shares no code with the
runtime except `fit` and `score_metric`, which have their own tests.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Any

import literal
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from bpc_calib.compat import cache_name
from bpc_calib.method.fitting import fit, mean_key
from bpc_calib.method.metric import score_metric

NAME = "masked_reference"
NUDGE = 16  # size of a nudge in units of eps times the vector's RMS: what earlier layers may have rounded

_cache: ContextVar["ReferenceCache"] = ContextVar("reference")


class ReferenceCache(DynamicCache):
    """transformers' own cache, with the data that decides the set."""

    def __init__(
        self, config: Any, artifact: Any, sparse_layers: list[int], *, nudge: int | None = None, **rules: Any
    ) -> None:
        """Make an empty cache; `nudge`, a seed, moves queries and keys as much as another order of sums could."""
        super().__init__(config=config)
        self.nudge = None if nudge is None else torch.Generator().manual_seed(nudge)
        self.rules = rules
        self.sparse_layers = sparse_layers
        self.calibrated = {} if artifact is None else artifact.layers
        # By layer: projection, metric and mean, each [batch, kv_heads, ...]; before that, the queries of steps with
        # several tokens, [batch, heads, head_dim] by place.
        self.online: dict[int, list[Tensor]] = {}
        self.asked: dict[int, dict[int, Tensor]] = {layer: {} for layer in sparse_layers}
        self.guarded = dict.fromkeys(sparse_layers, 0)

    def projection(self, layer: int, row: int, head: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if layer in self.calibrated:
            return of_head(self.calibrated[layer], head)
        projection, metric, mean = (tensor[row, head] for tensor in self.online[layer])
        return projection, metric, mean

    def nudged(self, tensor: Tensor) -> Tensor:
        if self.nudge is None:
            return tensor
        size = NUDGE * torch.finfo(tensor.dtype).eps * tensor.square().mean(-1, keepdim=True).sqrt()
        return tensor + size * torch.randn(tensor.shape, generator=self.nudge, dtype=tensor.dtype)

    def reset(self) -> None:
        for layer in self.layers:  # because the reset of transformers 5.17 keeps the length
            layer.keys = layer.values = None
            layer.is_initialized = False
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = 0
        self.online = {}
        self.asked = {layer: {} for layer in self.sparse_layers}
        self.guarded = dict.fromkeys(self.sparse_layers, 0)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        length = int(self.get_seq_length())  # in transformers 5.17 a tensor of the cache, which counts on
        self.guarded = {layer: min(count, length) for layer, count in self.guarded.items()}
        self.asked = {
            layer: {place: query for place, query in asked.items() if place < length}
            for layer, asked in self.asked.items()
        }

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._rebatch(lambda tensor: tensor[beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._rebatch(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._rebatch(lambda tensor: tensor[indices])

    def _rebatch(self, change: Any) -> None:
        self.online = {layer: [change(tensor) for tensor in tensors] for layer, tensors in self.online.items()}
        self.asked = {
            layer: {place: change(query) for place, query in asked.items()} for layer, asked in self.asked.items()
        }


@contextmanager
def masked_reference(model: Any) -> Iterator[None]:
    """Replace the model's attention with the reference inside the `with` block."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    hook = model.register_forward_pre_hook(_remember_cache, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        model.set_attn_implementation(before)


def _remember_cache(model: Any, args: Any, kwargs: Any) -> None:
    _cache.set(kwargs.get(cache_name()))


def _attention(module, query, key, value, attention_mask, scaling=None, **arguments):
    cache, layer = _cache.get(), module.layer_idx
    if isinstance(cache, ReferenceCache):
        query, key = cache.nudged(query), cache.nudged(key)
    group = query.shape[1] // key.shape[1]
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    logits = query.double() @ key.repeat_interleave(group, 1).double().mT * scaling
    if attention_mask is not None:
        # A finite value, because a row of padding may see no token; its output is not used.
        logits = logits.masked_fill(attention_mask[..., : key.shape[2]] != 0, -1e30)
    if isinstance(cache, ReferenceCache) and layer in cache.sparse_layers:
        if query.shape[2] > 1:
            cache.guarded[layer] = key.shape[2]
            first = key.shape[2] - query.shape[2]
            cache.asked[layer] |= {first + i: query[:, :, i] for i in range(query.shape[2])}
        else:
            _mask_unselected(cache, layer, logits, query, key, attention_mask, group, scaling)
    weights = logits.softmax(-1)
    return (weights @ value.repeat_interleave(group, 1).double()).to(query.dtype).transpose(1, 2), None


def _mask_unselected(cache, layer, logits, query, key, attention_mask, group, scaling) -> None:
    rules = cache.rules
    batch, heads, length = key.shape[:3]
    hidden = torch.zeros(batch, length) if attention_mask is None else attention_mask[:, 0, 0, :length]
    visible = [[i for i, masked in enumerate(row) if not masked] for row in hidden.expand(batch, -1).tolist()]
    wanted = [how_many(len(tokens), rules["budget"], rules["min_tokens"], rules["min_context"]) for tokens in visible]
    if all(k == len(tokens) for k, tokens in zip(wanted, visible, strict=True)):
        return
    if layer not in cache.calibrated and layer not in cache.online:
        found = [
            _online(key[row, head, visible[row]], _asked(cache.asked[layer], row, head, group, visible[row]), rules)
            for row in range(batch)
            for head in range(heads)
        ]
        cache.online[layer] = [torch.stack(each).unflatten(0, (batch, heads)) for each in zip(*found, strict=True)]
    for row in range(batch):
        for head in range(heads):
            queries = query[row, head * group : (head + 1) * group, 0]
            keys = key[row, head]
            scores, error = score(queries, keys, *cache.projection(layer, row, head), visible[row], rules, scaling)
            chosen = choose(scores, error, visible[row], wanted[row], cache.guarded[layer], rules)
            outside = [i for i in range(length) if i not in chosen]
            logits[row, head * group : (head + 1) * group, 0, outside] = -torch.inf


def _asked(asked: dict[int, Tensor], row: int, head: int, group: int, visible: list[int]) -> Tensor:
    """Return the queries of one KV head, `[n, D]`, without those of padding."""
    queries = [query[row, head * group : (head + 1) * group] for place, query in asked.items() if place in visible]
    return torch.cat(queries)


def _online(keys: Tensor, queries: Tensor, rules: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rules["seed"])
    metric = score_metric(queries.double().T @ queries.double())
    found = fit(keys, rules["bits"], iterations=4, rounds=2, metric=metric, mean=mean_key(keys), generator=generator)
    assert found.mean is not None
    return found.projection, metric, found.mean


def of_head(layer: Any, head: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return projection, metric and mean of one KV head of an artifact's layer."""
    projection, metric, mean = (
        None if array is None else torch.from_numpy(array[head])
        for array in (layer.projection, layer.metric, layer.mean)
    )
    assert projection is not None
    return projection, metric, mean


def how_many(count: int, budget: float | int, min_tokens: int, min_context: int = 0) -> int:
    """Return `k = min(N, max(min_tokens, b))`, or N below `min_context`."""
    if count < min_context:
        return count
    wanted = budget if isinstance(budget, int) else int(Fraction(str(budget)) * count)
    return min(count, max(min_tokens, wanted))


def score(
    queries: Tensor,
    keys: Tensor,
    projection: Tensor,
    metric: Tensor | None,
    mean: Tensor | None,
    visible: list[int],
    rules: dict[str, Any],
    scaling: float | None = None,
) -> tuple[list[int], list[float]]:
    """Return the integer rank of each key and its error, for queries `[G, D]`, keys `[N, D]` and `P [R, D]`."""
    rounded = projection.to(keys.dtype).double()
    whole = torch.eye(keys.shape[1], dtype=torch.float64) if metric is None else metric.double()
    towards = (rounded @ whole).to(keys.dtype).double()
    centred = keys.double() - (0 if mean is None else mean.double())
    projected = queries.double() @ rounded.T
    nibbles = len(projection) != rules["bits"]
    unit = 29216 // (rules["bits"] // 4) if nibbles else 127
    codes, gains = _hashed(centred, rounded, towards, whole, nibbles)
    residual, largest = centred - codes @ rounded, projected.abs().max()
    quantized = (projected * (unit / largest)).round() if largest else projected
    ranked = (quantized @ codes.T).long()  # [G, N]
    if rules["gain"]:
        ranked = ranked * (gains + 32)
    # In the unit of the scores; in float32, like the scale of the query.
    logit = (64 if rules["gain"] else 1) / (
        (largest / unit).float() * (keys.shape[1] ** -0.5 if scaling is None else scaling)
    )
    by_group = literal.group_scores(ranked[:, visible].tolist(), rules["group"], logit.item(), visible)
    grouped = dict(zip(visible, by_group, strict=True))
    error = (residual @ whole * residual).sum(1).clamp(min=0).sqrt()
    return [int(grouped.get(i, 0)) for i in range(len(keys))], error.float().tolist()


def _hashed(centred: Tensor, rounded: Tensor, towards: Tensor, whole: Tensor, nibbles: bool) -> tuple[Tensor, Tensor]:
    """Return codes and gains of keys; each key is hashed once, because every step meets it again."""
    known = _known(b"".join(each.numpy().tobytes() for each in (rounded, towards, whole)))
    names = [key.numpy().tobytes() for key in centred]
    new = [i for i, name in enumerate(names) if name not in known]
    if new:
        keys = centred[new]
        codes = literal.encode_nibbles(keys, rounded, towards) if nibbles else literal.encode(keys, rounded, towards)[0]
        for i, key, code in zip(new, keys, codes, strict=True):
            known[names[i]] = code, literal.gain(key, code @ rounded, whole @ key)
    codes, gains = zip(*(known[name] for name in names), strict=True)
    return torch.stack(codes), torch.tensor(gains)


@functools.lru_cache(maxsize=16)
def _known(codebook: bytes) -> dict[bytes, tuple[Tensor, int]]:
    """Return the codes and gains of one codebook, by the bytes of their keys."""
    return {}


def choose(
    scores: list[int], error: list[float], visible: list[int], k: int, guarded: int, rules: dict[str, Any]
) -> list[int]:
    """Return the attended set, rule by rule."""
    newest = sorted(visible, reverse=True)[: rules["recent"]]
    first = visible[: rules["sink"]]
    worst = sorted((i for i in visible if i < guarded), key=lambda i: (-error[i], i))
    best = sorted(visible, key=lambda i: (-scores[i], i))
    chosen: list[int] = []
    for tokens, places in (
        (newest, k),
        (first, k),
        (worst, int(Fraction(str(rules["safeguard"])) * k)),
        (best, k),
    ):
        chosen += [i for i in tokens if i not in chosen][: min(places, k - len(chosen))]
    return chosen
