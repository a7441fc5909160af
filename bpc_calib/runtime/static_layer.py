"""Cache layers of fixed size: the slot of the next token is a tensor on the device."""

from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from bpc_calib.backends.dispatch import find
from bpc_calib.errors import InputError, ModelError
from bpc_calib.method.codebook import Codebook
from bpc_calib.method.rules import spread
from bpc_calib.method.shares import Shares
from bpc_calib.method.state import Rows
from bpc_calib.runtime.call import AttentionCall, as_output, with_layer
from bpc_calib.runtime.growing import reserve
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.layers import GrowingLayer, SparseLayer

__all__ = ["Clock", "StaticLayer"]


@dataclass
class Clock:
    """The state of a step, shared by all layers."""

    place: Tensor  # int64 [1]: slot of the new token
    counts: Tensor  # int64 [B, room]: number of tokens that a new token attends to, by its slot
    valid: Tensor | None  # bool [B, room]: False for padding
    width: int  # the largest count
    length: int  # slots in use, counted on the host
    stepping: bool = False  # whether a step is calling the model
    padding: Tensor | None = None  # int64 [B]: how many slots are padding; None: none
    shares: Tensor | None = None  # int64 [layers, 2 LEVELS, H_KV], of the layers that have some
    rows: Rows = field(init=False)  # the sequences of the step that runs
    k: Tensor = field(init=False)  # int64 [layers, B, H_KV]: by layer, where there are shares

    def tick(self) -> None:
        """Begin a step: find its sequences."""
        lengths = (self.place + 1).repeat(len(self.counts))
        k, room = self.counts.index_select(1, self.place), self.counts.shape[1]
        self.rows = Rows(lengths, k, room, self.width, self.valid)
        if self.shares is not None:
            real = lengths if self.padding is None else lengths - self.padding
            self.k = spread(k.squeeze(-1), real, self.shares)

    def share_out(self, layers: "list[StaticLayer]") -> None:
        """Take the shares of the layers that have some."""
        shares: list[Shares] = []
        for layer in layers:
            own = layer.layer.rules.shares
            if layer.chooses and own is not None:
                layer.nth, layer.width = len(shares), layer.layer.rules.most(self.counts.shape[1])
                shares.append(own)
        self.shares = torch.tensor(shares, device=self.place.device) if shares else None


class StaticLayer(GrowingLayer):
    """A layer for steps of one token; it replaces `layer`, which continues after `thaw`."""

    def __init__(self, layer: GrowingLayer, clock: Clock, *, chooses: bool) -> None:
        super().__init__(layer.rules, layer.common)
        self.layer, self.clock = layer, clock
        self.chooses = chooses and isinstance(layer, SparseLayer)
        self.codebook: Codebook | None = None  # None: attends to everything
        self.served = False
        self.nth, self.width = -1, 0  # among the layers with shares, and the most tokens that one of its heads takes
        names = ["keys", "values"]
        if self.chooses:
            if not isinstance(layer, BPCLayer):
                raise ModelError(f"static steps do not serve the ranking of a {type(layer).__name__}")
            names += [name for name in ("codes", "gain", "error") if name in layer.buffers]
            layer.worst()
            self.codebook = layer.codebook
        room = clock.counts.shape[1]
        for name in names:
            layer.replace(name, reserve(layer.buffers[name], clock.length, room))
        layer.show(clock.length)  # otherwise its old views keep the old buffers in memory
        self.buffers = {name: layer.buffers[name][:, :, :room] for name in names}
        if self.chooses and "worst" in layer.buffers:
            self.buffers["worst"] = layer.buffers["worst"]
        self.keys, self.values = self.buffers["keys"], self.buffers["values"]
        self.dtype, self.device, self.is_initialized = self.keys.dtype, self.keys.device, True

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return self.clock.length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[batch, kv_heads, 1, head_dim]`; the returned keys carry this layer for BPC's attention.

        Raises:
            InputError: no static step is running, or there are several tokens.
        """
        if not self.clock.stepping:
            self._rebatch()
        if key_states.shape[2] != 1:
            raise InputError(f"a static step takes one token, not {key_states.shape[2]}")
        key_states, value_states = key_states.to(self.dtype), value_states.to(self.dtype)
        find(key_states).append(self.state(), self.codebook, key_states, value_states, self.clock.place)
        self.served = False
        return with_layer(self.keys, self), self.values

    def attention(self, call: AttentionCall) -> Tensor:
        """Compute attention of one new token per sequence, already cached: `[batch, 1, query_heads, head_dim]`.

        Raises:
            ModelError: the sliding window is shorter than the buffers.
        """
        room = self.clock.counts.shape[1]
        if call.window is not None and call.window < room:
            raise ModelError(
                f"the sliding window of {call.window} tokens is shorter than the {room} of the cache: static steps "
                "serve only full attention"
            )
        if isinstance(self.layer, SparseLayer):
            self.layer.serve(call.module)
            self.layer.scale(call.scaling)
        self.served = True
        query = call.grouped(self.keys.shape[1])
        state, rows = self.state(), self.clock.rows
        serving = find(query, state)
        if self.codebook is None:
            out = serving.dense_decode(query, state, rows, call.scaling)
        else:
            if self.nth >= 0:
                rows = replace(rows, k=self.clock.k[self.nth], width=self.width)
            out, _ = serving.sparse_decode(query, self.codebook, state, rows, self.layer.rules)
        return as_output(out)

    def thaw(self) -> GrowingLayer:
        """Return the replaced layer, with the tokens of all steps."""
        self.layer.show(self.clock.length)
        if self.chooses:
            self.layer.hashed = self.clock.length
        return self.layer

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `InputError`."""
        self._rebatch()

    def check_free(self) -> None:
        """Raise `InputError`."""
        self._rebatch()

    def __deepcopy__(self, memo: Any) -> "StaticLayer":
        """Raise `InputError`."""
        self._rebatch()

    def _rebatch(self, change: Any = None) -> NoReturn:
        raise InputError("the cache is in a `static_steps` block: leave the block before you use the cache otherwise")
