"""Cache layers of fixed size: the slot of the next token is a tensor on the device."""

from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from bpc_calib.backends.dispatch import append, choose, dense_attention, sparse_attention
from bpc_calib.errors import InputError, ModelError
from bpc_calib.method.appending import Slots
from bpc_calib.method.choosing import Cached
from bpc_calib.runtime.call import AttentionCall, with_layer
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
    lengths: Tensor = field(init=False)  # int64 [B]: slots in use, including that of the new token
    k: Tensor = field(init=False)  # int64 [B, 1]: number of tokens that the new token attends to

    def tick(self) -> None:
        """Begin a step: compute `lengths` and `k` for its layers."""
        self.lengths = (self.place + 1).repeat(len(self.counts))
        self.k = self.counts.index_select(1, self.place)


class StaticLayer(GrowingLayer):
    """A layer for steps of one token; it replaces `layer`, which continues after `thaw`."""

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
        layer.show(clock.length)  # otherwise its old views keep the old buffers in memory
        self.buffers = {name: layer.buffers[name][:, :, :room] for name in names}
        self.slots = Slots(**self.buffers)
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
        encoder = self.layer.encoder if self.chooses else None
        append(encoder, key_states, value_states, self.clock.place, self.slots)
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
        self.served = True
        grouped = call.query.squeeze(2).unflatten(1, (self.keys.shape[1], -1))
        lengths, valid = self.clock.lengths, self.clock.valid
        if self.chooses:
            cached = Cached(self.buffers["codes"], self.buffers.get("gain"), valid, lengths, self.worst)
            k, width = self.clock.k, self.clock.width
            indices = choose(grouped, self.layer.projection, cached, k, self.choice, width=width)
            out = sparse_attention(grouped, self.keys, self.values, indices, call.scaling)
        else:
            out = dense_attention(grouped, self.keys, self.values, lengths, call.scaling, valid=valid)
        return out.flatten(1, 2).unsqueeze(1)

    def thaw(self) -> GrowingLayer:
        """Return the replaced layer, with the tokens of all steps."""
        self.layer.show(self.clock.length)
        if self.chooses:
            self.layer.hashed = self.clock.length
        return self.layer

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `InputError`."""
        self._rebatch()

    def reset(self) -> None:
        """Raise `InputError`."""
        self._rebatch()

    def __deepcopy__(self, memo: Any) -> "StaticLayer":
        """Raise `InputError`."""
        self._rebatch()

    def _rebatch(self, change: Any = None) -> NoReturn:
        raise InputError("the cache is in a `static_steps` block: leave the block before you use the cache otherwise")
