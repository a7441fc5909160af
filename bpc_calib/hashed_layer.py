"""BPC's own layer: a code, a gain and an error beside every key."""

from collections.abc import Callable

import torch
from torch import Tensor

from bpc_calib.decomposition import decompose
from bpc_calib.encoding import encode
from bpc_calib.errors import ModelError
from bpc_calib.layers import Rules, SparseLayer
from bpc_calib.models import ModelDescription
from bpc_calib.scoring import hash_scores, quantize_query

__all__ = ["BPCLayer"]

# Steps a bit for projections found in the prompt: it waits for them. The authors' release takes as many.
ONLINE_ITERATIONS = 4
HASHED_AT_ONCE = 1 << 16  # tokens: hashing takes some 20 bytes a bit and key on its way


class BPCLayer(SparseLayer):
    """Ranks tokens by the codes of their keys."""

    def __init__(self, index: int, rules: Rules, model: ModelDescription, projection: Tensor | None) -> None:
        super().__init__(index, rules, model, projection)
        self.projection = projection  # the one in use; online: [batch, kv_heads, bits, head_dim]
        self.hashed = 0  # how many tokens have codes

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        """Integers `[batch, kv_heads, N]` for queries `[batch, kv_heads, G, head_dim]`: the best is attended first."""
        projection = self._hash(visible)
        length = self.get_seq_length()
        gain = self.buffers["gain"][:, :, :length] if self.rules.gain else None
        scores = hash_scores(quantize_query(query, projection), self.buffers["codes"][:, :, :length], gain)
        return scores.amax(-2) if self.rules.group == "max" else scores.sum(-2, dtype=torch.int32)

    def errors(self) -> Tensor:
        """float32 `[batch, kv_heads, N]`, `-inf` for tokens that came one at a time."""
        errors = torch.full_like(self.buffers["error"][:, :, : self.get_seq_length()], -torch.inf)
        errors[:, :, : self.guarded] = self.buffers["error"][:, :, : self.guarded]
        return errors

    def ranking_bytes(self, length: int) -> int:
        """Bytes of the codes, gains and errors of a sequence."""
        bits = self.rules.bits if self.calibrated is None else self.calibrated.shape[1]
        return length * self.keys.shape[1] * (8 * -(-bits // 64) + self.rules.gain + 4 * bool(self.rules.safeguard))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` of the newest tokens."""
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        self.hashed = min(self.hashed, length)
        if not length:
            self.projection = self.calibrated

    def _rebatch(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._rebatch(change)
        if self.calibrated is None and self.projection is not None:
            self.projection = change(self.projection)

    def _hash(self, visible: Tensor | None) -> Tensor:
        """Give the tokens that have none yet codes, errors and gains; return the projection of them all."""
        length, bits = self.get_seq_length(), self.rules.bits
        if self.projection is None:
            weights = None if visible is None else visible.unsqueeze(1).expand(self.keys.shape[:3])
            generator = torch.Generator().manual_seed(self.rules.seed)
            self.projection = decompose(
                self.keys, bits, iterations=ONLINE_ITERATIONS, weights=weights, generator=generator
            ).projection
        if self.projection.device != self.keys.device:
            self.projection = self.projection.to(self.keys.device)
        if self.projection.shape[-3] != self.keys.shape[1]:
            raise ModelError(
                f"layer {self.index} has {self.keys.shape[1]} KV heads here, the projections "
                f"{self.projection.shape[-3]}"
            )
        while self.hashed < length:
            end = min(length, self.hashed + HASHED_AT_ONCE)
            encoded = encode(self.keys[:, :, self.hashed : end], self.projection)
            self._append("codes", self.hashed, encoded.codes)
            if self.rules.safeguard:
                self._append("error", self.hashed, encoded.error)
            if self.rules.gain:
                self._append("gain", self.hashed, encoded.gain)
            self.hashed = end
        return self.projection
