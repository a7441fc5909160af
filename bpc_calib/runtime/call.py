"""One call of a model's attention: the cache layer that its keys carry, and the sequences that its mask describes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bpc_calib.compat import continued_cache_restarts
from bpc_calib.errors import InputError, ModelError
from bpc_calib.method.state import Rows

__all__ = ["AttentionCall", "Seen", "as_output", "check_continued", "layer_of", "visible_tokens", "with_layer"]


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call that transformers makes to a model's attention."""

    module: Any
    query: Tensor  # [batch, query_heads, new, head_dim]
    mask: Any  # in the form that the model's own attention uses
    scaling: float | None  # factor on the products q k; None: head_dim ** -0.5
    window: int | None  # length of the sliding window; None: full attention
    positions: Tensor | None  # [batch, new]

    def grouped(self, kv_heads: int) -> Tensor:
        """Return the queries of one new token per sequence by KV head: `[batch, kv_heads, G, head_dim]`."""
        return self.query.squeeze(2).unflatten(1, (kv_heads, -1))


def as_output(attended: Tensor) -> Tensor:
    """Return attention `[batch, kv_heads, G, head_dim]` as transformers takes it: `[batch, 1, heads, head_dim]`."""
    return attended.flatten(1, 2).unsqueeze(1)


def with_layer(keys: Tensor, layer: Any) -> Tensor:
    """Return a view of the keys `[batch, kv_heads, N, head_dim]` that carries the layer that cached them.

    Setting the attribute on the stored tensor itself would create a reference cycle that keeps the cache alive.
    """
    view = keys[:]
    view.bpc_layer = layer  # type: ignore[attr-defined]
    return view


def layer_of(keys: Tensor) -> Any:
    """Return the layer, with a method `attention`, that `with_layer` attached; None for keys of any other cache."""
    return getattr(keys, "bpc_layer", None)


@dataclass
class Seen:
    """What the mask of the step that runs says, and the rows made from it: found once for all layers of a cache."""

    asked: tuple[Any, ...] | None = None
    visible: Tensor | None = None  # bool [batch, N]; None: no padding
    real: tuple[int, ...] = ()  # tokens of each sequence without padding
    lengths: Tensor | None = None  # int64 [batch]
    # By the tokens that each KV head of each sequence attends to: in this step, and in the step before.
    made: dict[tuple[tuple[int, ...], ...], Rows] = field(default_factory=dict)
    before: dict[tuple[tuple[int, ...], ...], Rows] = field(default_factory=dict)
    host: Rows | None = None  # of the step, every token, on the CPU

    def rows_of(self, call: AttentionCall, keys: Tensor, counts: Callable[[int], tuple[int, ...]]) -> Rows | None:
        """Return the sequences of a step with one new token each; None: each attends to all of its tokens.

        Args:
            call: of the step; the result is on the device of its queries.
            keys: `[batch, kv_heads, N, head_dim]`, with the new token.
            counts: returns the numbers of attended tokens, one or one per KV head, for a number of real tokens.

        Raises:
            ModelError, InputError: as `visible_tokens`.
        """
        self._look(call, keys)
        length, device = keys.shape[2], call.query.device
        wanted = tuple(map(counts, self.real))
        if (rows := self.made.get(wanted)) is not None:
            return rows
        if all(min(some) == real for some, real in zip(wanted, self.real, strict=True)):
            return None
        most, old = max(map(max, wanted)), self.before.get(wanted)
        if old is not None and old.k.device == device:  # mostly
            k = old.k
        elif self.visible is None and len(wanted[0]) == 1:  # a number alike for all needs no copy from the host
            k = torch.full((len(keys), 1), most, device=device)
        else:
            k = torch.tensor(wanted, device=device)
        assert self.lengths is not None
        rows = self.made[wanted] = Rows(self.lengths, k, length, most, self.visible)
        return rows

    def every(self, call: AttentionCall, keys: Tensor) -> Rows:
        """Return the sequences of a pass whose tokens attend to all before them; see `rows_of`."""
        self._look(call, keys)
        assert self.lengths is not None
        return Rows(self.lengths, self.lengths.unsqueeze(-1), keys.shape[2], keys.shape[2], self.visible)

    def in_memory(self, call: AttentionCall, keys: Tensor) -> Rows:
        """Return `every` on the CPU; of padding a mask of all tokens comes there, once per pass."""
        rows = self.every(call, keys)
        if self.host is None:
            lengths = torch.full((len(keys),), rows.longest)
            valid = None if rows.valid is None else rows.valid.cpu()
            self.host = replace(rows, lengths=lengths, k=lengths.unsqueeze(-1), valid=valid)
        return self.host

    def _look(self, call: AttentionCall, keys: Tensor) -> None:
        """Find what the mask says, unless it is that of the call before."""
        (batch, _, length, _), device = keys.shape, call.query.device
        asked = (call.mask, batch, length, device, call.window)
        if self.asked is None or self.asked[0] is not call.mask or self.asked[1:] != asked[1:]:
            self.visible = visible_tokens(call.mask, (batch, length), device, call.window)
            self.real = (length,) * batch if self.visible is None else tuple(self.visible.sum(-1).tolist())
            self.asked, self.lengths = asked, torch.full((batch,), length, device=device)
            self.made, self.before, self.host = {}, self.made, None


def visible_tokens(mask: Any, size: tuple[int, int], device: torch.device, window: int | None) -> Tensor | None:
    """Return the cached tokens that the newest may attend to, bool `[batch, N]`; None: all of them.

    Args:
        mask: None, bool or additive `[batch, 1, 1, N]`, `[batch, N]`, or the block mask of flex attention.
        size: batch and N.
        device: of the mask and of the result.
        window: length of the sliding window; None: no window.

    Raises:
        ModelError: the mask differs between heads, or weighs tokens.
        InputError: the mask is shorter than the cache.
    """
    batch, length = size
    if mask is None and (window is None or window >= length):
        return None
    place = torch.arange(length, device=device)
    if mask is None:
        visible = torch.ones(batch, length, dtype=torch.bool, device=device)
    elif hasattr(mask, "mask_mod"):
        rows = torch.arange(batch, device=device).unsqueeze(-1)
        zero = torch.zeros((), dtype=torch.long, device=device)
        visible = mask.mask_mod(rows, zero, zero, place).expand(batch, length)
    else:
        if mask.dim() == 4:
            if mask.shape[1] != 1:
                raise ModelError("the attention mask differs between heads, which BPC does not serve")
            mask = mask[:, 0, -1]
        if mask.shape[-1] < length:
            raise InputError(f"the attention mask covers {mask.shape[-1]} of {length} cached tokens")
        visible = _as_bool(mask[:, :length]).expand(batch, length)
    if window is not None:
        visible = visible & (place >= length - window)
    return None if visible.all() else visible


def _as_bool(mask: Tensor) -> Tensor:
    if not mask.dtype.is_floating_point:
        return mask.bool()
    visible = mask == 0
    if (visible | (mask <= torch.finfo(mask.dtype).min / 2)).all():
        return visible
    raise ModelError("the attention mask weighs tokens, which BPC does not serve: it must keep or remove each token")


def check_continued(query: Tensor, key: Tensor, mask: Any, positions: Tensor | None) -> None:
    """Refuse cached tokens that `generate` feeds a second time, a fault of transformers before 5.21.

    With `prefill_chunk_size` and a continued cache, it feeds the whole text again from position 0, after the tokens
    that are already cached.

    Args:
        query: `[batch, query_heads, new, head_dim]`.
        key: `[batch, kv_heads, N, head_dim]`, with the new tokens.
        mask: as in `visible_tokens`.
        positions: integers `[batch, new]`, of the new tokens; None: unknown.

    Raises:
        InputError: cached tokens are fed again, or the mask is shorter than the cache.
        ModelError: the mask differs between heads, or weighs tokens.
    """
    past = key.shape[2] - query.shape[2]
    if not past or positions is None or not continued_cache_restarts():
        return
    visible = visible_tokens(mask, (key.shape[0], key.shape[2]), query.device, None)
    began = torch.ones(1, dtype=torch.bool) if visible is None else visible[:, :past].any(-1).cpu()
    if began.any() and (positions[:, 0].cpu() == 0)[began.expand(len(positions))].all():
        raise InputError(
            f"the new tokens start at position 0 although {past} tokens are cached: before transformers 5.21, "
            "generate(prefill_chunk_size=...) cannot continue a cache; leave prefill_chunk_size out"
        )
