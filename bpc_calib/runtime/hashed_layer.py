"""BPC's cache layer: it stores a code, a gain and an error for every key."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from bpc_artifacts import LayerProjection
from bpc_calib.backends.dispatch import choose, encode_with, step
from bpc_calib.errors import InputError, ModelError
from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Cached, Choice
from bpc_calib.method.encoding import Encoder, make_encoder, projection_of
from bpc_calib.method.fitting import Fit
from bpc_calib.method.selection import worst_first
from bpc_calib.method.stepping import Hashed
from bpc_calib.models.description import ModelDescription, held_heads, rank_among
from bpc_calib.runtime.growing import writable
from bpc_calib.runtime.layers import SparseLayer
from bpc_calib.runtime.online_fit import Asked, fit_online, fitted_places, join
from bpc_calib.runtime.rules import Rules

__all__ = ["BPCLayer", "WholeStepLayer", "prepare"]

HASHED_AT_ONCE = 1 << 16  # tokens: hashing needs about 20 bytes of temporary memory per bit and key
# Heads of one fit: enough for every core of a CPU; with 1,024 keys of 128 numbers in float64 they take 67 MB.
HEADS_AT_ONCE = 64


class BPCLayer(SparseLayer):
    """A layer that chooses tokens by the codes of their keys."""

    def __init__(self, index: int, rules: Rules, model: ModelDescription, calibrated: LayerProjection | None) -> None:
        super().__init__(index, rules, model, calibrated)
        # In the dtype of the keys: [kv_heads, bits, head_dim]; online: [batch, kv_heads, bits, head_dim].
        self.projection: Tensor | None = None
        self.encoder: Encoder | None = None  # made from the projection
        self.hashed = 0  # number of tokens that have codes
        self.asked: Asked | None = None  # queries of the prompt, until online projections are fitted

    def observe(self, query: Tensor, scaling: float | None, places: Tensor) -> None:
        """Keep some queries `[batch, query_heads, n, head_dim]` for the metric of online projections."""
        if self.calibrated is None and self.projection is None:
            self.asked = join(self.asked, query, places)

    def choose(self, query: Tensor, k: int | Tensor, visible: Tensor | None) -> Tensor:
        """Choose the tokens whose codes score best, and those that are always attended."""
        projection, length = self.hash(visible), self.get_seq_length()
        gain = self.buffers["gain"][:, :, :length] if self.rules.gain else None
        cached = Cached(self.buffers["codes"][:, :, :length], gain, valid=visible, worst=self.worst())
        return choose(query, projection, cached, k, self.choice())

    def choice(self) -> Choice:
        """Return the ranking settings of a step, with the scaling of the latest call."""
        rules = self.rules
        return Choice(self.scaling, rules.group, recent=rules.recent, sink=rules.sink, safeguard=rules.safeguard)

    def worst(self) -> Tensor | None:
        """Return the tokens in the order of the safeguard, int32 `[batch, kv_heads, guarded]`; None: no safeguard."""
        if not self.rules.safeguard:
            return None
        if "worst" not in self.buffers or self.buffers["worst"].shape[2] != self.guarded:
            self.buffers["worst"] = worst_first(self.buffers["error"][:, :, : self.guarded])
        return self.buffers["worst"]

    def ranking_bytes(self, length: int) -> int:
        """Return the bytes of a sequence's codes and gains, and of the part of the safeguard's list that is read."""
        bits = self.rules.bits if self.calibrated is None else self.calibrated.bits
        listed = 4 * int(self.rules.safeguard * self.count(length))
        return self.keys.shape[1] * (length * (8 * -(-bits // 64) + self.rules.gain) + listed)

    def rewind(self, length: int) -> None:
        """Forget the tokens after the first `length`; keep the projection and the safeguard's list."""
        super().rewind(length)
        self._forget(length)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` of the newest tokens."""
        super().crop(tokens_to_remove)
        self.buffers.pop("worst", None)
        length = self.get_seq_length()
        self._forget(length)
        if not length:
            self.projection = self.encoder = None

    def _forget(self, length: int) -> None:
        self.hashed = min(self.hashed, length)
        if self.asked is not None:
            left = int((self.asked.places < length).sum())
            self.asked = Asked(self.asked.queries[:, :, :left], self.asked.places[:left]) if left else None

    def _rebatch(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._rebatch(change)
        if self.asked is not None:
            self.asked = Asked(change(self.asked.queries), self.asked.places)
        if self.calibrated is None and self.projection is not None and self.encoder is not None:
            self.projection, self.encoder = change(self.projection), self.encoder.change(change)

    def prepare(self, mask: Tensor | None) -> None:
        """Hash the cached tokens if the next step with one token chooses among them; the mask is `[batch, N]`."""
        visible = self.visible(mask)
        if self.will_choose(visible):
            self.hash(visible)

    def visible(self, mask: Tensor | None) -> Tensor | None:
        """Return a mask of the cached tokens as bool on their device; None: none is padding.

        Args:
            mask: bool or integers `[batch, N]`, 0 for padding; None: no padding.

        Raises:
            InputError: the mask does not fit the cache.
        """
        length = self.get_seq_length()
        if not length or mask is None:
            return None
        if tuple(mask.shape) != (self.keys.shape[0], length):
            raise InputError(
                f"attention_mask must be [{self.keys.shape[0]}, {length}] like the cache, not {list(mask.shape)}"
            )
        return None if mask.all() else mask.to(self.keys.device).bool()

    def will_choose(self, visible: Tensor | None) -> bool:
        """Return whether the next one-token step chooses among the cached tokens; `visible` is bool `[batch, N]`."""
        length = self.get_seq_length()
        longest = length if visible is None else int(visible.sum(-1).max())
        return bool(longest) and self.count(longest + 1) <= longest

    def unfitted(self) -> bool:
        """Return whether the layer waits for online projections."""
        return self.calibrated is None and self.projection is None

    def take_fit(self, fitted: Fit) -> None:
        """Hash with these online projections from now on."""
        dtype = self.keys.dtype
        self.encoder = make_encoder(fitted.projection, dtype, metric=fitted.metric, mean=fitted.mean)
        self.projection, self.asked = fitted.projection.to(dtype), None

    def hash(self, visible: Tensor | None) -> Tensor:
        """Compute the codes, errors and gains of the tokens that have none yet; return the projection.

        Args:
            visible: bool `[batch, N]`, False for padding, which no online projection is fitted to; None: no padding.

        Returns:
            `[kv_heads, bits, head_dim]`, or online `[batch, kv_heads, bits, head_dim]`, in the dtype of the keys.

        Raises:
            ModelError: the artifact's projections do not fit the KV heads of this process.
        """
        if self.unfitted():
            self.take_fit(fit_online(self.keys, self.asked, visible, self.rules.bits, self.rules.seed))
        elif self.projection is None:
            self._take_calibrated()
        assert self.projection is not None
        assert self.encoder is not None
        length = self.get_seq_length()
        while self.hashed < length:
            end = min(length, self.hashed + HASHED_AT_ONCE)
            encoded = encode_with(self.encoder, self.keys[:, :, self.hashed : end])
            self.append("codes", self.hashed, encoded.codes)
            if self.rules.safeguard:
                self.append("error", self.hashed, encoded.error)
            if self.rules.gain:
                self.append("gain", self.hashed, encoded.gain)
            self.hashed = end
        return self.projection

    def _take_calibrated(self) -> None:
        """Hash with the artifact's projections of the KV heads of this process from now on."""
        assert self.calibrated is not None
        keys, ranks, total = self.keys, self.model.ranks, len(self.calibrated.projection)
        heads = held_heads(total, keys.shape[1], rank_among(ranks), ranks)
        if heads is None:
            raise ModelError(
                f"layer {self.index} has {keys.shape[1]} KV heads, but its projections have {total}, and the cache's "
                f"config names {ranks} processes that shard them: make the cache from the config of the loaded "
                "model (model.config)"
            )
        self.projection, self.encoder = projection_of(self.calibrated, heads, keys.dtype, keys.device)


class WholeStepLayer(BPCLayer):
    """A layer that does the same as `BPCLayer`, with fewer calls; to choose otherwise, extend `BPCLayer` instead."""

    def attend(self, query: Tensor, k: int | Tensor, visible: Tensor | None, scaling: float | None) -> Tensor:
        """Hash the new token, choose and attend at once, where no other token needs a code and none is padding."""
        hashed = self.ready()
        if hashed is None or visible is not None or isinstance(k, Tensor):
            return super().attend(query, k, visible, scaling)
        self.scaling = self.scaling if scaling is None else scaling
        grouped = query.squeeze(2).unflatten(1, (self.keys.shape[1], -1))
        out = step(grouped, hashed, k, self.choice())
        self.hashed = hashed.length
        return out.flatten(1, 2).unsqueeze(1)

    def ready(self) -> Hashed | None:
        """Return the buffers for a step that hashes the newest token alone; None if `hash` has more to do."""
        length, buffers, encoder = self.get_seq_length(), self.buffers, self.encoder
        if self.projection is None or encoder is None or self.hashed != length - 1:
            return None
        kept = [buffers.get(name) for name in ("codes", "gain", "error")]
        if any(buffer is not None and (buffer.shape[2] < length or not writable(buffer)) for buffer in kept):
            return None  # `append` makes room
        slots = Slots(buffers["keys"], buffers["values"], *kept)
        return Hashed(self.projection, encoder, slots, length, self.worst())


def prepare(layers: Sequence[BPCLayer], mask: Tensor | None) -> None:
    """Hash what is cached in these layers; the mask is `[batch, N]`, and None where no token is padding.

    Raises:
        InputError: the mask does not fit the cache.
    """
    waiting = [
        layer
        for layer in layers
        if layer.unfitted() and (visible := layer.visible(mask)) is None and layer.will_choose(visible)
    ]
    for together in _alike(waiting):
        for layer, fitted in zip(together, _fit(together), strict=True):
            layer.take_fit(fitted)
    for layer in layers:
        layer.prepare(mask)


def _alike(layers: Sequence[BPCLayer]) -> Iterator[list[BPCLayer]]:
    """Yield groups of layers whose keys and queries have the same shapes."""

    def shapes(layer: BPCLayer) -> tuple[Any, ...]:
        asked = layer.asked
        return layer.keys.shape, layer.keys.dtype, layer.keys.device, None if asked is None else asked.queries.shape

    for _, found in groupby(layers, shapes):
        group = list(found)
        batch, kv_heads = group[0].keys.shape[:2]
        count = max(1, HEADS_AT_ONCE // (batch * kv_heads))
        for start in range(0, len(group), count):
            yield group[start : start + count]


def _fit(layers: Sequence[BPCLayer]) -> list[Fit]:
    """Fit the projections of layers of the same shapes, as if each were a part of the batch."""
    first, rules = layers[0], layers[0].rules
    batch, places = first.keys.shape[0], fitted_places(first.keys.shape[2]).to(first.keys.device)
    asked = None
    if first.asked is not None:
        queries = [layer.asked.queries for layer in layers if layer.asked is not None]
        asked = Asked(torch.cat(queries), first.asked.places)
    keys = torch.cat([layer.keys[:, :, places] for layer in layers])
    fitted = fit_online(keys, asked, None, rules.bits, rules.seed)

    def part(tensor: Tensor | None) -> Sequence[Any]:
        return [None] * len(layers) if tensor is None else tensor.split(batch)

    parts = (part(tensor) for tensor in (fitted.projection, fitted.residual_norms, fitted.metric, fitted.mean))
    return [Fit(*each) for each in zip(*parts, strict=True)]
