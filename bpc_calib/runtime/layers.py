"""Layers of a cache whose decoding steps attend to some of the tokens: what they share, whatever ranks the tokens."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from bpc_artifacts import LayerProjection
from bpc_calib.backends.dispatch import sparse_attention
from bpc_calib.errors import InputError, ModelError
from bpc_calib.method.codes import check_bits
from bpc_calib.method.scoring import check_group
from bpc_calib.method.selection import attended, select
from bpc_calib.models.description import ModelDescription
from bpc_calib.runtime.growing import append

__all__ = ["GrowingLayer", "Rules", "SparseLayer"]


@dataclass(frozen=True)
class Rules:
    """What is attended, and how it is ranked: the arguments of `BPCCache` that every layer needs."""

    budget: float | int
    min_tokens: int
    safeguard: float
    recent: int
    sink: int
    group: str
    gain: bool
    bits: int
    seed: int
    min_context: int = 0  # a sequence with fewer tokens attends to all of them
    layers: tuple[int, ...] = ()  # those that choose

    def __post_init__(self) -> None:
        """Raise `InputError` at the first value out of range."""
        attended(1, self.budget)
        for name, least in (("min_tokens", 1), ("recent", 0), ("sink", 0), ("seed", 0), ("min_context", 0)):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} must be an integer of at least {least}, not {value!r}")
        if (
            isinstance(self.safeguard, bool)
            or not isinstance(self.safeguard, int | float)
            or not 0 <= self.safeguard <= 1
        ):
            raise InputError(f"safeguard must be a share in [0, 1], not {self.safeguard!r}")
        check_group(self.group)
        if not isinstance(self.gain, bool):
            raise InputError(f"gain must be True or False, not {self.gain!r}")
        if self.seed >= 1 << 63:
            raise InputError(f"seed must be below 2^63, not {self.seed}")
        check_bits(self.bits)


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values in buffers that grow by blocks; attends to everything."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[str, Tensor] = {}  # [batch, kv_heads, room, ...]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Cache `[batch, kv_heads, new, head_dim]` and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        if length and key_states.shape[0] != self.keys.shape[0]:
            raise InputError(f"the cache holds {self.keys.shape[0]} sequences, and {key_states.shape[0]} came")
        self._append("keys", length, key_states)
        self._append("values", length, value_states)
        self._show(length + key_states.shape[2])
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` of the newest tokens."""
        super().crop(tokens_to_remove)
        if not self.get_seq_length():  # the next tokens may come in a batch of another size
            self.buffers = {}
            self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make sequence `i` the former `beam_idx[i]`."""
        self._rebatch(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self._rebatch(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences."""
        self._rebatch(lambda tensor: tensor[indices, ...])

    def _append(self, name: str, length: int, new: Tensor) -> None:
        self.buffers[name] = append(self.buffers.get(name), length, new)

    def _show(self, length: int) -> None:
        """What the rest of transformers sees is as long as what is cached."""
        self.keys, self.values = self.buffers["keys"][:, :, :length], self.buffers["values"][:, :, :length]

    def _rebatch(self, change: Callable[[Tensor], Tensor]) -> None:
        if length := self.get_seq_length():
            self.buffers = {name: change(buffer) for name, buffer in self.buffers.items()}
            self._show(length)


class SparseLayer(GrowingLayer):
    """A layer whose steps of one token attend to the best tokens of a ranking: a subclass says which are best."""

    def __init__(self, index: int, rules: Rules, model: ModelDescription, calibrated: LayerProjection | None) -> None:
        super().__init__()
        self.index = index
        self.rules = rules
        self.model = model
        self.calibrated = calibrated  # None: none needed, or online
        self.scaling = model.head_dim**-0.5  # of the products, as the model last said
        self.guarded = 0  # how many were cached at the last step of several tokens
        self.served = True  # whether BPC's attention was called since the last update
        self.module: weakref.ref[Any] | None = None

    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        """Integers `[batch, kv_heads, N]` for queries `[batch, kv_heads, G, head_dim]`: the best is attended first."""
        raise NotImplementedError

    def ranking_bytes(self, length: int) -> int:
        """Bytes that ranking `length` tokens of a sequence reads."""
        return 0

    def observe(self, query: Tensor, scale: float | None) -> None:
        """A step of several tokens, already cached, with these queries `[batch, query_heads, new, head_dim]`."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Cache `[batch, kv_heads, new, head_dim]`; the keys returned lead BPC's attention to this layer."""
        self.served = False
        keys, values = super().update(key_states, value_states)
        if key_states.shape[2] > 1:
            self.guarded = keys.shape[2]
        # A view of its own: on the stored tensor the attribute would be a cycle that keeps the cache alive.
        keys = keys[:]
        keys.bpc_layer = self  # type: ignore[attr-defined]
        return keys, values

    def serve(self, module: Any) -> None:
        """BPC's attention was called with this layer's keys, by this module of the model."""
        owner = None if self.module is None else self.module()
        if owner is not module:
            if self.module is not None or not self.model.fits(module.config):
                raise ModelError(
                    f"layer {self.index}: this BPCCache belongs to another model; make one from this model's config"
                )
            self.module = weakref.ref(module)
        self.served = True

    def chosen(self, visible: Tensor | None) -> int | Tensor | None:
        """How many tokens the next token attends to: of every sequence, or int64 `[batch, 1]`; None for all."""
        if visible is None:
            length = self.get_seq_length()
            k = self.count(length)
            return k if k < length else None
        lengths = visible.sum(-1).tolist()
        wanted = [self.count(length) for length in lengths]
        return torch.tensor(wanted, device=visible.device).unsqueeze(-1) if wanted != lengths else None

    def count(self, length: int) -> int:
        """How many of `length` tokens are attended."""
        if length < self.rules.min_context:
            return length
        return attended(length, self.rules.budget, self.rules.min_tokens)

    def attend(self, query: Tensor, k: int | Tensor, visible: Tensor | None, scale: float | None) -> Tensor:
        """Attention of one new token a sequence, already cached, over the best `k` tokens.

        Args:
            query: `[batch, query_heads, 1, head_dim]`.
            k: as `chosen` gives it.
            visible: bool `[batch, N]`; False is padding. None: no padding.

        Returns:
            `[batch, 1, query_heads, head_dim]`.
        """
        self.scaling = self.scaling if scale is None else scale
        grouped = query.squeeze(2).unflatten(1, (self.keys.shape[1], -1))
        indices = self.choose(grouped, k, visible)
        return sparse_attention(grouped, self.keys, self.values, indices, scale).flatten(1, 2).unsqueeze(1)

    def choose(self, query: Tensor, k: int | Tensor, visible: Tensor | None) -> Tensor:
        """Indices `[batch, kv_heads, k]` of the tokens attended, for queries `[batch, kv_heads, G, head_dim]`."""
        rules = self.rules
        valid = None if visible is None else visible.unsqueeze(1)
        return select(self.rank(query, visible), k, valid=valid, recent=rules.recent, sink=rules.sink)

    def step_bytes(self, length: int, token: int) -> int:
        """Bytes that a step reads a sequence, where the keys and values of a token take `token`."""
        k = self.count(length)
        return k * token + (self.ranking_bytes(length) if k < length else 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` of the newest tokens."""
        super().crop(tokens_to_remove)
        self.guarded = min(self.guarded, self.get_seq_length())
