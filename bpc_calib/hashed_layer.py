"""BPC's own layer: a code, a gain and an error beside every key."""

from collections.abc import Callable

import torch
from torch import Tensor

from bpc_artifacts import LayerProjection
from bpc_calib.encoding import Encoder, encode_with, make_encoder
from bpc_calib.errors import ModelError
from bpc_calib.fitting import fit
from bpc_calib.layers import Rules, SparseLayer
from bpc_calib.models import ModelDescription
from bpc_calib.scoring import RELATIVE_LIMIT, QuantizedQuery, group_scores, hash_scores, quantize_query

__all__ = ["BPCLayer"]

# For projections found in the prompt, which waits for them: steps a bit, as many as in the authors' release, and rounds
# of least squares. A query metric does not help there (docs/projections.md).
ONLINE_ITERATIONS, ONLINE_ROUNDS = 4, 2
HASHED_AT_ONCE = 1 << 16  # tokens: hashing takes some 20 bytes a bit and key on its way


class BPCLayer(SparseLayer):
    """Ranks tokens by the codes of their keys."""

    encode = staticmethod(encode_with)  # a subclass that searches for better codes is compared in the same place

    def __init__(self, index: int, rules: Rules, model: ModelDescription, calibrated: LayerProjection | None) -> None:
        super().__init__(index, rules, model, calibrated)
        self.projection: Tensor | None = None  # the one in use, [kv_heads, bits, head_dim]; online: of every sequence
        self.encoder: Encoder | None = None  # made from it
        self.hashed = 0  # how many tokens have codes

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        """Integers `[batch, kv_heads, N]` for queries `[batch, kv_heads, G, head_dim]`: the best is attended first."""
        asked = quantize_query(query, self.hash(visible))
        return self.group(self.head_scores(asked), self.logit(asked), visible)

    def head_scores(self, asked: QuantizedQuery) -> Tensor:
        """Of every query head: int32 `[batch, kv_heads, G, N]`."""
        length = self.get_seq_length()
        gain = self.buffers["gain"][:, :, :length] if self.rules.gain else None
        return hash_scores(asked, self.buffers["codes"][:, :, :length], gain)

    def logit(self, asked: QuantizedQuery) -> Tensor:
        """What one logit is in the unit of the scores: float32 `[batch, kv_heads]`."""
        return (64 if self.rules.gain else 1) / (asked.scale * self.scaling)

    def group(self, scores: Tensor, logit: Tensor, visible: Tensor | None) -> Tensor:
        """One score a key for scores `[batch, kv_heads, G, N]`."""
        limit = (RELATIVE_LIMIT * logit).clamp(max=1 << 24).to(scores.dtype)
        valid = None if visible is None else visible.unsqueeze(1)
        return group_scores(scores, self.rules.group, valid=valid, limit=limit)

    def errors(self) -> Tensor:
        """float32 `[batch, kv_heads, N]`, `-inf` for tokens that came one at a time."""
        errors = torch.full_like(self.buffers["error"][:, :, : self.get_seq_length()], -torch.inf)
        errors[:, :, : self.guarded] = self.buffers["error"][:, :, : self.guarded]
        return errors

    def ranking_bytes(self, length: int) -> int:
        """Bytes of the codes, gains and errors of a sequence."""
        bits = self.rules.bits if self.calibrated is None else self.calibrated.projection.shape[1]
        return length * self.keys.shape[1] * (8 * -(-bits // 64) + self.rules.gain + 4 * bool(self.rules.safeguard))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` of the newest tokens."""
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        self.hashed = min(self.hashed, length)
        if not length:
            self.projection = self.encoder = None

    def _rebatch(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._rebatch(change)
        if self.calibrated is None and self.projection is not None and self.encoder is not None:
            self.projection, self.encoder = change(self.projection), self.encoder.change(change)

    def hash(self, visible: Tensor | None) -> Tensor:
        """Give the tokens that have none yet codes, errors and gains; return the projection of them all."""
        if self.projection is None or self.encoder is None:
            self.projection, self.encoder = self._begin(visible)
        length = self.get_seq_length()
        while self.hashed < length:
            end = min(length, self.hashed + HASHED_AT_ONCE)
            encoded = self.encode(self.encoder, self.keys[:, :, self.hashed : end])
            self._append("codes", self.hashed, encoded.codes)
            if self.rules.safeguard:
                self._append("error", self.hashed, encoded.error)
            if self.rules.gain:
                self._append("gain", self.hashed, encoded.gain)
            self.hashed = end
        return self.projection

    def _begin(self, visible: Tensor | None) -> tuple[Tensor, Encoder]:
        """The projection, and what hashes with it: calibrated, or found in the keys cached now."""
        keys = self.keys
        if self.calibrated is None:
            weights = None if visible is None else visible.unsqueeze(1).expand(keys.shape[:3])
            generator = torch.Generator().manual_seed(self.rules.seed)
            found = fit(
                keys,
                self.rules.bits,
                iterations=ONLINE_ITERATIONS,
                rounds=ONLINE_ROUNDS,
                weights=weights,
                generator=generator,
            )
            return found.projection, make_encoder(found.projection, keys.dtype)
        projection, metric, mean = (
            None if array is None else torch.from_numpy(array).to(keys.device)
            for array in (self.calibrated.projection, self.calibrated.metric, self.calibrated.mean)
        )
        assert projection is not None
        if projection.shape[0] != keys.shape[1]:
            raise ModelError(
                f"layer {self.index} has {keys.shape[1]} KV heads here, the projections {projection.shape[0]}"
            )
        return projection, make_encoder(projection, keys.dtype, metric=metric, mean=mean)
