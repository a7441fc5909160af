"""Layers of a cache that keeps its size: where the next token goes, the device knows."""

from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from bpc_calib.backends.dispatch import choose, dense_attention, sparse_attention
from bpc_calib.errors import InputError, ModelError
from bpc_calib.method.choosing import Cached
from bpc_calib.runtime.attention_call import AttentionCall, with_layer
from bpc_calib.runtime.growing import reserve
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.layers import GrowingLayer, SparseLayer

__all__ = ["Clock", "StaticLayer"]


@dataclass
class Clock:
    """Where a step stands, the same for all layers."""

    place: Tensor  # int64 [1]: the slot of the new token
    counts: Tensor  # int64 [B, room]: how many tokens it attends to, by its slot
    valid: Tensor | None  # bool [B, room]: False is padding
    width: int  # the largest count
    length: int  # slots in use, as the host knows
    stepping: bool = False  # whether the model was called by a step
    lengths: Tensor = field(init=False)  # int64 [B]: slots in use, that of the new token included
    k: Tensor = field(init=False)  # int64 [B, 1]

    def tick(self) -> None:
        """Begin a step: what its layers are told, in tensors of its own."""
        self.lengths = (self.place + 1).repeat(len(self.counts))
        self.k = self.counts.index_select(1, self.place)


class StaticLayer(GrowingLayer):
    """A layer of one new token a step; `layer` goes on where it ends (`thaw`)."""

    def __init__(self, layer: GrowingLayer, clock: Clock, *, chooses: bool) -> None:
        super().__init__()
        self.layer, self.clock = layer, clock
        self.chooses = chooses and isinstance(layer, SparseLayer)
        self.served = False
        names = ["keys", "values"]
        if self.chooses:
            if not isinstance(layer, BPCLayer):
                raise ModelError(f"static steps do not serve the ranking of a {type(layer).__name__}")
            names += [name for name in ("codes", "gain", "error") if name in layer.buffers]
            self.choice, self.worst = layer.choice(), layer.worst()
        room = clock.counts.shape[1]
        for name in names:
            layer.buffers[name] = reserve(layer.buffers[name], clock.length, room)
        layer.show(clock.length)  # or what it showed would keep the former buffers
        self.buffers = {name: layer.buffers[name][:, :, :room] for name in names}
        self.keys, self.values = self.buffers["keys"], self.buffers["values"]
        self.dtype, self.device, self.is_initialized = self.keys.dtype, self.keys.device, True

    def get_seq_length(self) -> int:
        """Tokens cached."""
        return self.clock.length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Cache `[batch, kv_heads, 1, head_dim]`; the keys returned lead BPC's attention to this layer."""
        if not self.clock.stepping:
            self._rebatch()
        if key_states.shape[2] != 1:
            raise InputError(f"{key_states.shape[2]} tokens came at once: a static step has one")
        key_states, value_states = key_states.to(self.dtype), value_states.to(self.dtype)
        self._write("keys", key_states)
        self._write("values", value_states)
        if self.chooses:
            encoded = self.layer.encode(self.layer.encoder, key_states)
            for name in self.buffers.keys() & {"codes", "gain", "error"}:
                self._write(name, getattr(encoded, name))
        self.served = False
        return with_layer(self.keys, self), self.values

    def attention(self, call: AttentionCall) -> Tensor:
        """Attention of one new token per sequence, already cached: `[batch, 1, query_heads, head_dim]`.

        Raises:
            ModelError: a sliding window shorter than the buffers.
        """
        room = self.clock.counts.shape[1]
        if call.window is not None and call.window < room:
            raise ModelError(
                f"a sliding window of {call.window} tokens, and {room} to come: static steps serve full attention only"
            )
        if isinstance(self.layer, SparseLayer):
            self.layer.serve(call.module)
        self.served = True
        grouped = call.query.squeeze(2).unflatten(1, (self.keys.shape[1], -1))
        lengths, valid = self.clock.lengths, self.clock.valid
        if self.chooses:
            cached = Cached(self.buffers["codes"], self.buffers.get("gain"), valid, lengths, self.worst)
            k, width = self.clock.k, self.clock.width
            indices = choose(grouped, self.layer.projection, cached, k, self.choice, width=width)
            out = sparse_attention(grouped, self.keys, self.values, indices, call.scale)
        else:
            out = dense_attention(grouped, self.keys, self.values, lengths, call.scale, valid=valid)
        return out.flatten(1, 2).unsqueeze(1)

    def thaw(self) -> GrowingLayer:
        """The layer below, with the tokens that came."""
        self.layer.show(self.clock.length)
        if self.chooses:
            self.layer.hashed = self.clock.length
        return self.layer

    def crop(self, tokens_to_remove: int) -> None:
        """Refused."""
        self._rebatch()

    def reset(self) -> None:
        """Refused."""
        self._rebatch()

    def __deepcopy__(self, memo: Any) -> "StaticLayer":
        """Refused."""
        self._rebatch()

    def _rebatch(self, change: Any = None) -> NoReturn:
        raise InputError("the cache takes static steps: leave `static_steps` before anything else is done with it")

    def _write(self, name: str, new: Tensor) -> None:
        self.buffers[name].index_copy_(2, self.clock.place, new)
