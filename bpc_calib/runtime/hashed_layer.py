"""BPC's cache layer: it stores a code, a gain and an error for every key."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from bpc_artifacts import LayerProjection
from bpc_calib.backends.dispatch import find
from bpc_calib.errors import InputError, ModelError
from bpc_calib.method.codebook import Codebook, codebook_of, make_codebook
from bpc_calib.method.fitting import Fit
from bpc_calib.method.rules import Rules
from bpc_calib.method.selection import worst_first
from bpc_calib.method.state import Rows, alike
from bpc_calib.models.description import held_heads, rank_among
from bpc_calib.runtime.growing import grown
from bpc_calib.runtime.layers import Common, SparseLayer
from bpc_calib.runtime.online_fit import ASKED, Asked, fit_online, fitted_places, join, moment_metric, prompt_moment

__all__ = ["BPCLayer", "prepare"]

HASHED_AT_ONCE = 1 << 16  # tokens: hashing needs about 20 bytes of temporary memory per bit and key
# Heads of one fit: enough for every core of a CPU; with 1,024 keys of 128 numbers in float64 they take 67 MB.
HEADS_AT_ONCE = 64
# When a cache is so many times as long as when its codebook was made, new prompts adapt the codes, too, and all keys
# are hashed again: in all, fewer than two keys for each that comes.
GROWN = 2
PROMPT = 64  # tokens of a pass that counts as a further prompt: fewer may be drafts, which come often


class BPCLayer(SparseLayer):
    """A layer that chooses tokens by the codes of their keys."""

    def __init__(self, index: int, rules: Rules, common: Common, calibrated: LayerProjection | None) -> None:
        super().__init__(index, rules, common, calibrated)
        self.codebook: Codebook | None = None  # one per sequence where the prompt had a part in it
        self.hashed = 0  # number of tokens that have codes
        self.asked: Asked | None = None  # queries of prompts that have not adapted the codes
        self.moments: Tensor | None = None  # of those that adapted the codes, float32 [batch, kv_heads, D, D]
        self.made_at = 0  # tokens that were cached when the codebook was made

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `SparseLayer.update`; with the first keys, take the shares of the KV heads of this process.

        Raises:
            ModelError: the artifact's projections do not fit these.
        """
        shares, held = self.rules.shares, key_states.shape[1]
        if not self.is_initialized and shares is not None and len(shares[0]) != held:
            heads = self.heads(len(shares[0]), held)
            self.rules = replace(self.rules, shares=tuple(each[heads] for each in shares))
        return super().update(key_states, value_states, *args, **kwargs)

    def observe(self, query: Tensor, scaling: float | None, places: Tensor) -> None:
        """Keep some queries `[batch, query_heads, n, head_dim]` for the metric."""
        if self.unfitted() or (self.adaptable and (self.codebook is None or len(places) >= PROMPT)):
            self.asked = join(self.asked, query, places)

    def decode(self, query: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Attend to the tokens whose codes score best, and those that are always attended."""
        length, kept = self.get_seq_length(), ("codes", *self.kept())
        fresh = max(0, length - self.hashed)
        if self.codebook is None or fresh > 1 or self.apart or "codes" not in self.buffers:
            self.hash(rows.valid)
            fresh = 0
        elif fresh:  # the step itself hashes the new token
            for name in kept:
                self.replace(name, grown(self.buffers[name], self.hashed, length))
        assert self.codebook is not None
        self.worst()
        state = self.state()
        if self.apart:
            chosen = find(query, state).choose(query, self.codebook, state, rows, self.rules)
            return self.attend_chosen(query, chosen), chosen
        found = find(query, state).sparse_decode(query, self.codebook, state, rows, self.rules, fresh=fresh)
        self.hashed = length
        return found

    def attend_chosen(self, query: Tensor, chosen: Tensor) -> Tensor:
        """Attend to these tokens on the CPU; only the queries, the tokens and the result move."""
        asked, state = query.cpu(), self.pairs()
        rows = alike(self.keys, chosen.shape[2])
        out = find(asked, state).attend(asked, state, rows, chosen.cpu(), self.rules.scaling)
        return out.to(query.device)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.common.bits if self.calibrated is None else self.calibrated.bits

    @property
    def nibbles(self) -> bool:
        """Whether codes are nibbles instead of signs."""
        return self.calibrated is not None and self.calibrated.nibbles

    def kept(self) -> tuple[str, ...]:
        """Return what is kept of the keys beside their codes."""
        return ("error",) * bool(self.rules.safeguard) + ("gain",) * self.rules.gain

    def worst(self) -> None:
        """Keep the tokens in the order of the safeguard, int32 `[batch, kv_heads, guarded]`, if there is one."""
        if self.rules.safeguard and ("worst" not in self.buffers or self.buffers["worst"].shape[2] != self.guarded):
            self.buffers["worst"] = worst_first(self.buffers["error"][:, :, : self.guarded])

    def ranking_bytes(self, length: int) -> int:
        """Return the bytes of a sequence's codes and gains, and of the part of the safeguard's list that is read."""
        k = self.counts(length)
        listed = sum(4 * int(self.rules.safeguard * each) for each in k) // len(k)
        return self.keys.shape[1] * (length * (8 * -(-self.bits // 64) + self.rules.gain) + listed)

    def contents(self) -> dict[str, Tensor]:
        """Return what the layer holds, by name; calibrated projections that no prompt had a part in are left out."""
        found = super().contents()
        if self.hashed:
            found |= {name: self.buffers[name][:, :, : self.hashed] for name in ("codes", *self.kept())}
            found |= {"made_at": torch.tensor([self.made_at])}
        if self.asked is not None:
            found |= {"asked.queries": self.asked.queries, "asked.places": self.asked.places}
        if self.moments is not None:
            found |= {"moments": self.moments}
        if self.codebook is not None and self.codebook.by_sequence:
            found |= self.codebook.tensors()
        return found

    def take(self, contents: Mapping[str, Tensor]) -> None:
        """Begin with what the `contents` of another layer were; the layer is empty."""
        super().take(contents)
        if "asked.queries" in contents:
            self.asked = Asked(contents["asked.queries"].clone(), contents["asked.places"].clone())
        self.made_at = int(contents.get("made_at", self.made_at))
        if "moments" in contents:
            self.moments = contents["moments"].clone()
        if "projection" in contents:
            cloned = {name: tensor.clone() for name, tensor in contents.items()}
            self.codebook = Codebook.of(cloned, nibbles=self.nibbles)
        if all(name in contents for name in ("codes", *self.kept())):
            for name in ("codes", *self.kept()):
                self.append(name, 0, contents[name])
            self.hashed = contents["codes"].shape[2]
            if self.codebook is None and self.calibrated is not None:
                self._take_calibrated()

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
            self.codebook, self.moments = None, None

    def _forget(self, length: int) -> None:
        self.hashed, self.made_at = min(self.hashed, length), min(self.made_at, length)
        if self.asked is not None:
            left = int((self.asked.places < length).sum())
            self.asked = Asked(self.asked.queries[:, :, :left], self.asked.places[:left]) if left else None

    def _rebatch(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._rebatch(change)
        if self.asked is not None:
            self.asked = Asked(change(self.asked.queries), self.asked.places)
        if self.moments is not None:
            self.moments = change(self.moments)
        if self.codebook is not None and self.codebook.by_sequence:
            self.codebook = self.codebook.change(change)

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
        return None if mask.all() else mask.to(self.device).bool()

    def will_choose(self, visible: Tensor | None) -> bool:
        """Return whether the next one-token step chooses among the cached tokens; `visible` is bool `[batch, N]`."""
        length = self.get_seq_length()
        longest = length if visible is None else int(visible.sum(-1).max())
        return bool(longest) and min(self.counts(longest + 1)) <= longest

    def unfitted(self) -> bool:
        """Return whether the layer waits for online projections."""
        return self.calibrated is None and self.codebook is None

    def take_fit(self, fitted: Fit) -> None:
        """Hash with these online projections from now on."""
        self.codebook = make_codebook(fitted.projection, self.keys.dtype, metric=fitted.metric, mean=fitted.mean)
        self.asked = None

    def hash(self, visible: Tensor | None) -> None:
        """Compute the codes, errors and gains of the tokens that have none yet.

        Args:
            visible: bool `[batch, N]`, False for padding, which no online projection is fitted to; None: no padding.

        Raises:
            ModelError: the artifact's projections do not fit the KV heads of this process.
        """
        length = self.get_seq_length()
        if self.unfitted():
            keys, common = self.keys.to(self.device), self.common
            self.take_fit(fit_online(keys, self.asked, visible, common.bits, common.seed))
        elif self.codebook is None or length >= GROWN * self.made_at:
            metric = self.count_prompts(visible)
            if self.codebook is None or metric is not None:
                self._take_calibrated(metric)
                self.buffers.pop("worst", None)
                self.hashed, self.made_at = 0, length
        assert self.codebook is not None
        while self.hashed < length:
            end = min(length, self.hashed + HASHED_AT_ONCE)
            keys = self.keys[:, :, self.hashed : end].to(self.device)
            encoded = find(keys).encode_with(self.codebook, keys)
            for name in ("codes", *self.kept()):
                self.append(name, self.hashed, getattr(encoded, name))
            self.hashed = end

    @property
    def adaptable(self) -> bool:
        """Whether the queries of a prompt may count in the metric of calibrated projections."""
        found = self.calibrated
        return self.common.adapt and found is not None and found.metric is not None

    def count_prompts(self, visible: Tensor | None) -> Tensor | None:
        """Add the queries that wait to `moments`; return the metric `[batch, kv_heads, head_dim, head_dim]` of all.

        None: there are too few, and nothing changed.

        Args:
            visible: bool `[batch, N]`, False for padding; None: no padding.
        """
        if not self.adaptable or self.asked is None or len(self.asked.places) < ASKED:
            return None
        length = self.get_seq_length()
        if visible is not None and int(visible.sum(-1).min()) < ASKED:
            return None
        # Each query that was kept stands for as many tokens.
        share = (length - self.made_at) / len(self.asked.places)
        new = (share * prompt_moment(self.asked, self.keys.shape[1], visible)).float()
        self.moments = new if self.moments is None else self.moments + new
        return moment_metric(self.moments)

    def _take_calibrated(self, metric: Tensor | None = None) -> None:
        """Hash with the artifact's projections of this process's KV heads from now on; `metric` is the prompt's."""
        assert self.calibrated is not None
        heads = self.heads(len(self.calibrated.projection), self.keys.shape[1])
        self.codebook = codebook_of(self.calibrated, heads, self.keys.dtype, self.device, metric)
        self.asked = None

    def heads(self, total: int, held: int) -> slice:
        """Return which of the artifact's KV heads this process holds.

        Raises:
            ModelError: so many heads are no shard of them.
        """
        ranks = self.common.model.ranks
        heads = held_heads(total, held, rank_among(ranks), ranks)
        if heads is None:
            raise ModelError(
                f"layer {self.index} has {held} KV heads, but its projections have {total}, and the cache's "
                f"config names {ranks} processes that shard them: make the cache from the config of the loaded "
                "model (model.config)"
            )
        return heads


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
        return layer.keys.shape, layer.keys.dtype, layer.device, None if asked is None else asked.queries.shape

    for _, found in groupby(layers, shapes):
        group = list(found)
        batch, kv_heads = group[0].keys.shape[:2]
        count = max(1, HEADS_AT_ONCE // (batch * kv_heads))
        for start in range(0, len(group), count):
            yield group[start : start + count]


def _fit(layers: Sequence[BPCLayer]) -> list[Fit]:
    """Fit the projections of layers of the same shapes, as if each were a part of the batch."""
    first, common = layers[0], layers[0].common
    batch, places = first.keys.shape[0], fitted_places(first.keys.shape[2]).to(first.keys.device)
    asked = None
    if first.asked is not None:
        queries = [layer.asked.queries for layer in layers if layer.asked is not None]
        asked = Asked(torch.cat(queries), first.asked.places)
    keys = torch.cat([layer.keys[:, :, places].to(layer.device) for layer in layers])
    fitted = fit_online(keys, asked, None, common.bits, common.seed)

    def part(tensor: Tensor | None) -> Sequence[Any]:
        return [None] * len(layers) if tensor is None else tensor.split(batch)

    parts = (part(tensor) for tensor in (fitted.projection, fitted.residual_norms, fitted.metric, fitted.mean))
    return [Fit(*each) for each in zip(*parts, strict=True)]
