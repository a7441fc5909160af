"""What the end of the prompt attended to in the heads that retrieve; more tokens for layers where choosing hurts."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bpc_calib.evaluation.baselines.apportion import apportion
from bpc_calib.evaluation.baselines.snapkv import SnapKVLayer, attention
from bpc_calib.evaluation.learning import REPEATED, LayerText
from bpc_calib.method.budget import attended

__all__ = ["CompressKVLayer"]

HEADS = 4  # of a layer, whose attention counts
ERROR_SHARE = 0.02  # of the tokens, kept where the error of a layer is measured


class CompressKVLayer(SnapKVLayer):
    """CompressKV (Lin et al. 2025): SnapKV by the attention of the layer's best retrieval heads alone.

    All KV heads of a layer keep the same tokens: those that 4 query heads attended to, as a mean over a window of 8
    tokens and these heads, smoothed by a mean over 5 tokens. These heads attend most to the whole span of a passage,
    wherever in it, while the text repeats it; the authors ask questions about a needle and take the answers' tokens.
    The window is limited as SnapKV's.

    Layers share the total by the error of a layer that keeps 2 % of a text, at least 16 tokens. Each keeps 32 tokens,
    or the mean if that is less, and the rest is in proportion to the errors, up to three times the mean. The authors
    measure the error while they decode answers to LongBench, behind the output projection, which the layers of a cache
    lack: here it is that of the heads' outputs, for the queries of the repetition. Not all queries of a text are kept,
    so there the window's are the last 8 before the repetition that are. Rounding is by largest remainders, theirs in
    the order of the errors: a difference of one token.
    """

    WINDOW, LEAST, MOST_MEANS = 8, 32, 3
    learned: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({})  # by layer, what `learn` returns

    @staticmethod
    def learn(text: LayerText, seed: int) -> dict[str, Tensor]:
        """Return how much each query head retrieves, `heads [query_heads]`, and the `error [1]` of the layer."""
        parts = zip(text.keys.split(1), text.values.split(1), text.queries.split(1), strict=True)
        texts = [replace(text, keys=keys, values=values, queries=queries) for keys, values, queries in parts]
        heads = torch.stack([retrieved(each) for each in texts]).mean(0)
        error = torch.stack([lost(each, best(heads)) for each in texts]).mean(0, keepdim=True)
        return {"heads": heads, "error": error}

    def importance(self, weights: Tensor) -> Tensor:
        found = agreed(weights, best(self.learned[self.index]["heads"]))
        return found.expand(-1, weights.shape[1], -1)

    @cached_property
    def errors(self) -> list[float]:
        """The errors of the layers that choose."""
        return [float(self.learned[layer]["error"]) for layer in self.common.layers]

    def kept(self, length: int) -> int:
        mean, layers = super().kept(length), self.common.layers
        least, most = min(self.LEAST, mean), min(self.MOST_MEANS * mean, length)
        return apportion(len(layers) * mean, self.errors, least, most)[layers.index(self.index)]


def best(scores: Tensor) -> Tensor:
    """Return the query heads with the largest scores `[query_heads]`: int64, at most `HEADS`, ascending."""
    return scores.topk(min(HEADS, len(scores))).indices.sort().values


def agreed(weights: Tensor, heads: Tensor) -> Tensor:
    """Return the mean of some query heads and the window, `[batch, 1, N]`, of `[batch, kv_heads, G, window, N]`."""
    return weights.flatten(1, 2)[:, heads.to(weights.device)].mean((1, 2)).unsqueeze(1)


def retrieved(text: LayerText) -> Tensor:
    """Return the share of attention on the passage, of the queries of its repetition in one text: `[query_heads]`."""
    weights = attention(text.queries[:, :, -REPEATED:], text.places[-REPEATED:], text.keys, text.scaling)
    return weights[..., text.passage : text.passage + REPEATED].sum(-1).mean(-1).flatten()


def lost(text: LayerText, heads: Tensor) -> Tensor:
    """Return the mean relative error, of the queries of the repetition in one text, if little before it is kept.

    As in the authors' code, the norms are those of the outputs of all heads for one query.
    """
    window, kernel = CompressKVLayer.WINDOW, CompressKVLayer.KERNEL
    prompt = text.keys.shape[2] - REPEATED
    asked = slice(-REPEATED - window, -REPEATED)
    weights = attention(text.queries[:, :, asked], text.places[asked], text.keys[:, :, :prompt], text.scaling)
    importance = F.avg_pool1d(agreed(weights[..., : prompt - window], heads), kernel, stride=1, padding=kernel // 2)
    count = attended(prompt, ERROR_SHARE, 2 * window)
    kept = torch.ones(text.keys.shape[2], dtype=torch.bool, device=text.keys.device)
    kept[: prompt - window] = False
    kept[importance.flatten().topk(count - window).indices] = True

    query, places, values = text.queries[:, :, -REPEATED:], text.places[-REPEATED:], text.values.float().unsqueeze(2)
    full = attention(query, places, text.keys, text.scaling) @ values
    # Removing the other keys keeps the order, so the newest are the same tokens at other places.
    places = torch.arange(REPEATED) + count
    sparse = attention(query, places, text.keys[:, :, kept], text.scaling) @ values[..., kept, :]
    each = (0, 1, 2, 4)
    error = torch.linalg.vector_norm(sparse - full, dim=each) / (torch.linalg.vector_norm(full, dim=each) + 1e-5)
    return error.mean()
