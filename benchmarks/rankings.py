"""Rankings compared with BPC's: other codes of the same size, other searches, other uses of the same codes.

Each is a layer that replaces BPC's in the same cache. Where a method leaves a choice open, it gets the better one:
queries are not rounded to int8, and least squares finds the scale of each bit.
"""

from typing import Any

import torch
from torch import Tensor

from bpc_calib.evaluation.baselines import SignsLayer, ranked
from bpc_calib.method.choosing import rank
from bpc_calib.method.codes import pack_codes, unpack_codes
from bpc_calib.method.encoded import Encoded, gain_byte
from bpc_calib.method.encoding import Encoder, encode_with
from bpc_calib.method.scoring import hash_scores, quantize_query
from bpc_calib.method.selection import sortable
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.layers import RankingLayer

# The mean [heads, D], the directions [heads, H, D], and the vectors that their bits stand for [heads, H, D].
Linear = tuple[Tensor, Tensor, Tensor]


class LinearLayer(SignsLayer):
    """Codes `sign((k - mean) W^T)` and scores `q B^T . u`: LSH, PCA, ITQ and RaBitQ differ in `W`, `B` and the gain."""

    linear: dict[int, Linear]
    use_gain: bool
    in_products: bool  # whether scores estimate q k

    def ranking_bytes(self, length: int) -> int:
        return super().ranking_bytes(length) + self.use_gain * length * self.keys.shape[1]

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        mean, directions, meaning = self.linear[self.index]

        def hashed(keys: Tensor) -> Tensor:
            keys = keys.float() - mean.unsqueeze(-2)
            signs = torch.where(keys @ directions.mT >= 0, 1.0, -1.0)
            if not self.use_gain:
                return signs
            dot = (keys * (signs @ meaning)).sum(-1)
            gain = torch.where(dot > 0, keys.square().sum(-1) / dot.clamp(min=1e-20), 4.48).clamp(0.5, 4.48)
            return signs * gain.unsqueeze(-1)

        scores = query.float() @ meaning.mT @ self._derived("signs", hashed).mT
        return ranked(self, scores, visible, in_products=self.in_products)


def linear(kind: str, keys: Tensor, bits: int, seed: int = 0) -> Linear:
    """`lsh`, `pca`, `itq` or `rabitq` of calibration keys `[heads, N, D]`, `bits` at most `D` except for LSH."""
    keys = keys.float()
    heads, _, dim = keys.shape
    mean = torch.zeros(heads, dim) if kind == "lsh" else keys.mean(-2)
    centred = keys - mean.unsqueeze(-2)
    generator = torch.Generator().manual_seed(seed)
    if kind == "lsh":
        directions = torch.randn(bits, dim, generator=generator).expand(heads, -1, -1)
    elif kind == "rabitq":  # the first `bits` directions of a random rotation
        directions = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q[:bits].expand(heads, -1, -1)
    else:
        vectors = torch.linalg.eigh(centred.double().mT @ centred.double()).eigenvectors.float()
        directions = vectors[..., -bits:].mT
        if kind == "itq":  # Gong and Lazebnik 2011: rotate the components until their signs fit them best
            components = centred @ directions.mT
            turn = torch.linalg.qr(torch.randn(directions.shape[-2], directions.shape[-2], generator=generator)).Q
            turn = turn.expand(heads, -1, -1)
            for _ in range(50):
                left, _, right = torch.linalg.svd(torch.where(components @ turn >= 0, 1.0, -1.0).mT @ components)
                turn = (left @ right).mT
            directions = turn.mT @ directions
    signs = torch.where(centred @ directions.mT >= 0, 1.0, -1.0)
    if kind == "lsh":
        meaning = directions
    elif kind == "rabitq":
        meaning = directions / dim**0.5
    else:  # the directions are orthogonal: least squares gives each bit the mean absolute component
        scale = (signs * (centred @ directions.mT)).mean(-2)
        meaning = directions * scale.unsqueeze(-1)
    return mean, directions, meaning


class DescentLayer(BPCLayer):
    """After the greedy pass, flip each bit if that lowers the error, three times over all bits.

    `PARALLEL` above 1 weighs the part of the error along the key itself more, as ScaNN does (Guo et al. 2020).
    """

    SWEEPS = 3
    PARALLEL = 1.0

    @classmethod
    def encode(cls, encoder: Encoder, keys: Tensor) -> Encoded:
        greedy = encode_with(encoder, keys)
        keys, along = encoder.centre(keys)
        bits = encoder.matrix.shape[-1]
        norm = (keys * along).sum(-1)
        scores, signs = keys @ encoder.matrix, unpack_codes(greedy.codes, bits)
        left = scores - signs @ encoder.gram  # product of the residual with each row
        parallel = norm - (signs * scores).sum(-1)  # product of the residual with the key
        extra = (cls.PARALLEL - 1) / norm.clamp(min=1e-20)
        for bit in list(range(bits)) * cls.SWEEPS:
            sign, score = signs[..., bit], scores[..., bit]
            change = 4 * sign * left[..., bit] + 4 * encoder.gram[..., bit, bit, None]
            moved = parallel + 2 * sign * score
            change += extra * (moved.square() - parallel.square())
            turned = torch.where(change < 0, 2 * sign, 0.0)
            left += turned.unsqueeze(-1) * encoder.gram[..., bit, None, :]
            parallel += turned * score
            signs[..., bit] -= turned
        return _encoded(encoder, scores, signs, norm)


class BeamLayer(BPCLayer):
    """Try both values of the next bit for each of the eight best codes so far, and keep the eight best."""

    WIDTH = 8

    @staticmethod
    def encode(encoder: Encoder, keys: Tensor) -> Encoded:
        keys, along = encoder.centre(keys)
        scores = keys @ encoder.matrix
        bits = scores.shape[-1]
        left = scores.unsqueeze(-2)  # [..., beam, H]
        signs = scores.new_zeros(*scores.shape[:-1], 1, bits)
        error = scores.new_zeros(*scores.shape[:-1], 1)
        for bit in range(bits):
            row, square = encoder.gram[..., None, None, bit, :], encoder.gram[..., bit, bit, None, None]
            grown = []
            for sign in (1.0, -1.0):
                chosen = signs.clone()
                chosen[..., bit] = sign
                grown.append((left - sign * row, chosen, error - 2 * sign * left[..., bit] + square))
            left, signs = (torch.cat([one[part], other[part]], dim=-2) for one, other in [grown] for part in (0, 1))
            error = torch.cat([grown[0][2], grown[1][2]], dim=-1)
            if error.shape[-1] > BeamLayer.WIDTH:
                best = error.topk(BeamLayer.WIDTH, dim=-1, largest=False).indices
                error = error.gather(-1, best)
                wide = best.unsqueeze(-1).expand(*best.shape, bits)
                left, signs = left.gather(-2, wide), signs.gather(-2, wide)
        best = error.argmin(-1)[..., None, None].expand(*error.shape[:-1], 1, bits)
        return _encoded(encoder, scores, signs.gather(-2, best).squeeze(-2), (keys * along).sum(-1))


def _encoded(encoder: Encoder, scores: Tensor, signs: Tensor, squared_norm: Tensor) -> Encoded:
    dot = (scores * signs).sum(-1)
    error = squared_norm - 2 * dot + (signs @ encoder.gram * signs).sum(-1)
    return Encoded(pack_codes(signs > 0), error.clamp(min=0).sqrt(), gain_byte(squared_norm, dot))


class ErrorBoundLayer(RankingLayer, BPCLayer):
    """The score plus a share of the stored error times the length of the query: a kind of upper bound."""

    SHARE = 0.1  # of the error; errors are stored only with a safeguard above 0

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        scores = self.estimates(query, visible)
        error = self.buffers["error"][:, :, None, : self.get_seq_length()]
        return ranked(self, scores + self.SHARE * query.float().norm(dim=-1, keepdim=True) * error, visible)

    def scores(self, query: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores, int32 `[batch, kv_heads, G, N]`, and the scale of the query `[batch, kv_heads]`."""
        asked, length = quantize_query(query, self.hash(visible)), self.get_seq_length()
        gain = self.buffers["gain"][:, :, :length] if self.rules.gain else None
        return hash_scores(asked, self.buffers["codes"][:, :, :length], gain), asked.scale

    def estimates(self, query: Tensor, visible: Tensor | None) -> Tensor:
        """Scores in the unit of `q k`: float32 `[batch, kv_heads, G, N]`."""
        scores, scale = self.scores(query, visible)
        return scores * (scale / (64 if self.rules.gain else 1))[..., None, None]


class SoftmaxLayer(ErrorBoundLayer):
    """The sum over the heads of the softmax of the estimated scores."""

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        return sortable(self.weights(query, visible).sum(-2))

    def weights(self, query: Tensor, visible: Tensor | None) -> Tensor:
        scores = self.estimates(query, visible) * self.scaling
        if visible is not None:
            scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        return scores.softmax(-1)


class LayerShareLayer(BPCLayer):
    """A different budget in every layer, with the same mean."""

    factors: dict[int, float]

    def count(self, length: int) -> int:
        return max(1, min(length, round(super().count(length) * self.factors[self.index])))


class TopPLayer(SoftmaxLayer):
    """As many tokens as the estimated softmax needs to reach a share `P`: a different number in every head and step."""

    P = 0.9
    taken, steps = 0.0, 0

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        scores, scale = self.scores(query, visible)
        valid = None if visible is None else visible.unsqueeze(1)
        rules = {"group": self.rules.group, "gain": self.rules.gain, "scaling": self.scaling}
        return rank(scores, scale, valid=valid, **rules)

    def choose(self, query: Tensor, k: int | Tensor, visible: Tensor | None) -> Tensor:
        weights = self.weights(query, visible).amax(-2)
        reached = (weights / weights.sum(-1, keepdim=True)).sort(-1, descending=True).values.cumsum(-1)
        needed = ((reached < self.P).sum(-1) + 1).clamp(max=self.get_seq_length())
        self.taken, self.steps = self.taken + float(needed.float().mean()), self.steps + 1
        return super().choose(query, needed, visible)

    def step_bytes(self, length: int, token: int) -> int:
        return round(self.taken / max(1, self.steps) * token) + self.ranking_bytes(length)


def subclass(layer: type[Any], **values: Any) -> type[Any]:
    """A subclass of a layer with other constants."""
    return type(layer.__name__, (layer,), values)
