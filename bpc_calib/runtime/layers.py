"""Base classes of cache layers: growing buffers, and decoding steps that attend to only part of the tokens."""

import copy
import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from bpc_artifacts import LayerProjection
from bpc_calib.backends.dispatch import backend, find
from bpc_calib.backends.switch_over import IN_TRANSFORMERS, ON_X86, Costs, sparse_from
from bpc_calib.compat import has_amx, is_x86
from bpc_calib.errors import ModelError
from bpc_calib.method.rules import Rules
from bpc_calib.method.selection import select
from bpc_calib.method.state import Rows, State
from bpc_calib.method.step import attend
from bpc_calib.models.description import ModelDescription
from bpc_calib.models.long_passes import slow_products
from bpc_calib.runtime.call import AttentionCall, Seen, as_output, check_continued, with_layer
from bpc_calib.runtime.growing import append
from bpc_calib.runtime.kv_device import KVPlace
from bpc_calib.runtime.mapped import TokenFile, with_room

__all__ = ["Common", "DenseLayer", "GrowingLayer", "RankingLayer", "SparseLayer"]

# Bytes of the keys and values of a layer, per thread, below which torch's attention takes less time with AMX.
SHORT = 1.2e6
FEW = 16  # queries of a pass that the CPU takes where keys and values are with it and the model is not


@dataclass
class Common:
    """What the layers of a cache share, beside their rules."""

    model: ModelDescription
    bits: int = 64  # of the codes of online projections
    seed: int = 0  # of online projections
    adapt: bool = True  # whether calibrated projections take the metric of the prompt's queries, too
    layers: tuple[int, ...] = ()  # indices of the layers that choose tokens
    switches: bool = False  # whether `min_context` is where sparse steps begin to pay
    place: KVPlace | None = None  # of keys and values; None: where the model is
    full: bool = False  # whether passes attend to everything now, and leave no trace but their tokens
    seen: Seen = field(default_factory=Seen)
    told: dict[int, Any] = field(default_factory=dict)  # by layer: what a method's layers tell each other
    fitting: weakref.ref[Any] | None = None  # the config of the model that was found to be this one

    def fits(self, config: Any) -> bool:
        """Whether a text model's config is this model's; the layers of a model share one, so it is compared once."""
        if self.fitting is None or self.fitting() is not config:
            if not self.model.fits(config):
                return False
            self.fitting = weakref.ref(config)
        return True


def own_from(device: torch.device, dtype: torch.dtype) -> float:
    """Return from how many bytes of a layer's keys and values on BPC's kernel attends to all of them faster than torch.

    On an x86 processor it does for 16-bit numbers; infinity: nowhere.
    """
    if device.type != "cpu" or backend(device) != "native":
        return math.inf
    if slow_products(dtype) is not None:
        return 0
    if dtype not in (torch.bfloat16, torch.float16) or not is_x86():
        return math.inf
    return SHORT * torch.get_num_threads() if has_amx() else 0


def costs_of(own: float) -> Costs:
    """Return what choosing costs beside dense steps; `own` is what `own_from` says of those."""
    return ON_X86 if own < math.inf else IN_TRANSFORMERS


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A layer with its keys and values in buffers that grow by blocks; every step attends to everything."""

    device: torch.device  # of the model; known after the first tokens

    def __init__(self, rules: Rules, common: Common) -> None:
        super().__init__()
        self.rules, self.common = rules, common
        self.buffers: dict[str, Tensor] = {}  # [batch, kv_heads, room, ...]
        self.file: TokenFile | None = None  # of the keys and values; None: they are in memory
        self.own_from = math.inf  # bytes of keys and values from which BPC's kernel attends to all of them
        self._state: State | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values `[batch, kv_heads, new, head_dim]`; return all keys and values.

        Raises:
            InputError: the disk is full.
        """
        if value_states.dtype != key_states.dtype:  # autocast may leave them so
            value_states = value_states.to(key_states.dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.own_from = own_from(key_states.device, key_states.dtype)
            if self.common.switches:
                self.rules = replace(self.rules, min_context=self.switch_over(key_states))
        length, new = self.get_seq_length(), (key_states, value_states)
        if self.apart:
            key_states, value_states = key_states.cpu(), value_states.cpu()
        self.take_room(key_states)
        self.append("keys", length, key_states)
        self.append("values", length, value_states)
        self.show(length + key_states.shape[2])
        return new if self.apart else (self.keys, self.values)

    @property
    def apart(self) -> bool:
        """Whether keys and values are with the CPU and the model is elsewhere; then `update` returns the new alone."""
        return self.common.place is not None and self.is_initialized and self.device.type != "cpu"

    def whole(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values for the model's own attention; it has those that `update` returned."""
        if self.apart and keys.shape[2] < self.get_seq_length():
            return self.keys.to(self.device), self.values.to(self.device)
        return keys, values

    def contents(self) -> dict[str, Tensor]:
        """Return what the layer holds, by name: `take` gives it to another layer."""
        return {"keys": self.keys, "values": self.values}

    def take(self, contents: Mapping[str, Tensor]) -> None:
        """Begin with what the `contents` of another layer were; the layer is empty."""
        self.update(contents["keys"], contents["values"])

    def take_room(self, keys: Tensor) -> None:
        """Take disk space for new keys `[batch, kv_heads, new, head_dim]` and their values, if they are kept there.

        Raises:
            InputError: the disk is full; the layer holds what it held.
        """
        folder = None if self.common.place is None else self.common.place.folder
        if folder is None:
            return
        length, limit = self.get_seq_length(), self.common.model.context_limit or 0
        file = with_room(self.file, folder, keys, length, limit)
        if file is not self.file:
            self._use(file)
            if length:
                self.show(length)  # otherwise its views keep the old file

    def switch_over(self, keys: Tensor) -> int:
        """Return from how many tokens choosing pays, for keys `[batch, kv_heads, new, head_dim]`."""
        (batch, heads, _, dim), model = keys.shape, self.common.model
        token = 2 * heads * dim * keys.element_size()
        return sparse_from(token, batch, model.query_heads // model.ranks, keys.device, costs_of(self.own_from))

    def append(self, name: str, length: int, new: Tensor) -> None:
        """Write `[batch, kv_heads, new, ...]` after the first `length` tokens of the named buffer."""
        self.replace(name, append(self.buffers.get(name), length, new))

    def replace(self, name: str, buffer: Tensor) -> None:
        """Keep this buffer, and nothing that holds the one before."""
        if self.buffers.get(name) is not buffer:
            self.buffers[name], self._state = buffer, None

    def show(self, length: int) -> None:
        """Set `keys` and `values`, which transformers reads, to the first `length` tokens of the buffers."""
        self.keys, self.values = self.buffers["keys"].narrow(2, 0, length), self.buffers["values"].narrow(2, 0, length)

    def state(self) -> State:
        """Return what is cached; the same object as long as no buffer was replaced."""
        held = {name: self.buffers.get(name) for name in ("keys", "values", "codes", "gain", "error", "worst")}
        if held["keys"] is None:  # borrowed
            held |= {"keys": self.keys, "values": self.values}
        if self._state is None or any(getattr(self._state, name) is not each for name, each in held.items()):
            self._state = State(**held, mapped=self.file is not None)  # type: ignore[arg-type]
        return self._state

    def pairs(self) -> State:
        """Return the keys and values alone: codes may have less room, or be on another device."""
        return State(self.buffers["keys"], self.buffers["values"], mapped=self.file is not None)

    def rows(self, call: AttentionCall) -> Rows | None:
        """Return the sequences of a step with one new token each; None: each attends to all of its tokens.

        Raises:
            ModelError: BPC cannot read the mask.
        """
        if self.get_seq_length() < self.rules.min_context:  # no sequence is longer than its padded row
            return None
        return self.common.seen.rows_of(call, self.keys, self.counts)

    def attend_to_all(self, call: AttentionCall) -> Tensor | None:
        """Return full attention `[batch, new, query_heads, head_dim]` of BPC's kernel; None: use the model's own.

        The model's own repeats the keys of each KV head for its query heads where several tokens are new.

        Raises:
            ModelError: BPC cannot read the mask.
        """
        new, kv_heads, seen = call.query.shape[2], self.keys.shape[1], self.common.seen
        if not self.apart and (backend(self.keys.device) == "torch" or hasattr(call.mask, "mask_mod")):
            return None
        query = call.query.unflatten(1, (kv_heads, -1)).to(self.keys.device)
        state = self.pairs()
        rows = seen.in_memory(call, self.keys) if self.apart else seen.every(call, self.keys)
        kernels = find(query[:, :, :, -1], state)
        out = kernels.dense_decode(query.flatten(2, 3), state, rows, call.scaling, new=new)
        return out.unflatten(2, (-1, new)).flatten(1, 2).transpose(1, 2).to(call.query.device)

    def attend_few(self, call: AttentionCall) -> Tensor | None:
        """Return `attend_to_all` for few queries where that is faster; None: use the model's own attention.

        Of keys that are apart, the model's own would need a copy on its device.
        """
        new = call.query.shape[2]
        faster = new <= FEW if self.apart else new == 1 and 2 * self.keys.nbytes >= self.own_from
        return self.attend_to_all(call) if faster else None

    def count(self, length: int) -> int:
        """Return the number of attended tokens at `length` tokens, the mean of all KV heads of all layers."""
        return self.rules.count(length)

    def counts(self, length: int) -> tuple[int, ...]:
        """Return `count` by KV head; one number where all have the same."""
        return self.rules.by_head(self.count(length), length)

    def check_free(self) -> None:
        """Raise `InputError` while something else uses the layer."""

    def rewind(self, length: int) -> None:
        """Forget the tokens after the first `length` without moving a buffer.

        Unlike `crop`, which users call, this keeps everything that was derived from the prompt.
        """
        self.show(length)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` of the newest tokens."""
        super().crop(tokens_to_remove)
        if not self.get_seq_length():  # the next tokens may have another batch size
            self.buffers, self.file, self._state = {}, None, None
            self.keys, self.values = self.keys.clone(), self.values.clone()  # which hold no buffer
            self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence `i` by the former sequence `beam_idx[i]`."""
        self._rebatch(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self._rebatch(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences with these indices: integers or bool, `[sequences]`."""
        self._rebatch(lambda tensor: tensor[indices.to(tensor.device), ...])

    def _rebatch(self, change: Callable[[Tensor], Tensor]) -> None:
        if length := self.get_seq_length():
            in_file = () if self.file is None else ("keys", "values")
            changed = {name: change(buffer) for name, buffer in self.buffers.items() if name not in in_file}
            if self.file is not None:
                self._use(self.file.copied(change(torch.arange(len(self.keys))).tolist(), length))
            self.buffers, self._state = self.buffers | changed, None
            self.show(length)

    def _use(self, file: TokenFile) -> None:
        """Keep keys and values in this file."""
        self.file = file
        self.replace("keys", file.keys)
        self.replace("values", file.values)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GrowingLayer":
        """Return an independent copy, with a file of its own where keys and values are on disk."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        if self.file is not None:
            length = self.get_seq_length()
            other = self.file.copied(range(len(self.keys)), length)
            old = (self.file, self.buffers["keys"], self.buffers["values"], self.keys, self.values)
            new = (other, other.keys, other.values, other.keys[:, :, :length], other.values[:, :, :length])
            memo |= {id(one): another for one, another in zip(old, new, strict=True)}
        made.__dict__.update(copy.deepcopy(vars(self), memo))
        return made


class SparseLayer(GrowingLayer):
    """A layer whose one-token steps attend to the tokens that a subclass chooses."""

    def __init__(self, index: int, rules: Rules, common: Common, calibrated: LayerProjection | None) -> None:
        super().__init__(rules, common)
        self.index = index
        self.calibrated = calibrated  # None: the layer needs no projection, or fits one to the prompt
        self.guarded = 0  # tokens in the cache at the last step with several tokens
        self.served = True  # whether BPC's attention was called since the last update
        self.module: weakref.ref[Any] | None = None

    @abstractmethod
    def decode(self, query: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Attend to the tokens that this layer chooses.

        Args:
            query: `[batch, kv_heads, G, head_dim]`, of one new token per sequence, already cached.
            rows: the sequences.

        Returns:
            `[batch, kv_heads, G, head_dim]`, and the tokens, int64 `[batch, kv_heads, width]`, ascending, -1 behind the
            last; None if the query heads of a KV head choose apart.
        """

    def ranking_bytes(self, length: int) -> int:
        """Return the bytes that ranking `length` tokens reads per sequence."""
        return 0

    def observe(self, query: Tensor, scaling: float | None, places: Tensor) -> None:
        """Receive queries `[batch, query_heads, n, head_dim]` of a step with several tokens, already cached.

        Args:
            query: at least those of the newest tokens, in order.
            scaling: factor on the products q k; None: `head_dim ** -0.5`.
            places: int64 `[n]`, the tokens of the queries, ascending.
        """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[batch, kv_heads, new, head_dim]`; the returned keys carry this layer for BPC's attention."""
        self.served = False
        keys, values = super().update(key_states, value_states)
        if key_states.shape[2] > 1 and not self.common.full:
            self.guarded = self.keys.shape[2]
        return with_layer(keys, self), values

    def attention(self, call: AttentionCall) -> Tensor | None:
        """Return the attention output `[batch, new, query_heads, head_dim]`; None: use the model's own attention.

        Raises:
            ModelError: the cache belongs to another model, or BPC cannot read the mask.
            InputError: transformers feeds the new tokens at wrong positions.
        """
        self.serve(call.module)
        if self.common.full:
            return self.attend_to_all(call)
        if call.query.shape[2] > 1:
            check_continued(call.query, self.keys, call.mask, call.positions)
            length = self.get_seq_length()
            self.observe(call.query, call.scaling, torch.arange(length - call.query.shape[2], length))
            return self.attend_few(call)
        self.scale(call.scaling)
        rows = self.rows(call)
        if rows is None:
            return self.attend_few(call)
        out, _ = self.decode(call.grouped(self.keys.shape[1]), rows)
        return as_output(out)

    def scale(self, scaling: float | None) -> None:
        """Take the model's own factor on the products q k; None: `head_dim ** -0.5`."""
        if scaling is not None and scaling != self.rules.scaling:
            self.rules = replace(self.rules, scaling=scaling)

    @property
    def scaling(self) -> float:
        """The factor on the products q k."""
        return self.rules.scale(self.common.model.head_dim)

    def serve(self, module: Any) -> None:
        """Record that this attention module called BPC's attention with this layer's keys.

        Raises:
            ModelError: the cache belongs to another model.
        """
        owner = None if self.module is None else self.module()
        if owner is not module:
            if self.module is not None or not self.common.fits(module.config):
                raise ModelError(
                    f"layer {self.index}: this BPCCache belongs to another model; create one from this model's config"
                )
            self.module = weakref.ref(module)
        self.served = True

    def skip_attention(self) -> None:
        """Accept the last update without attention, because its tokens were cached without a pass of the model."""
        self.served = True

    def contents(self) -> dict[str, Tensor]:
        """Return what the layer holds, by name."""
        return super().contents() | {"guarded": torch.tensor([min(self.guarded, self.get_seq_length())])}

    def take(self, contents: Mapping[str, Tensor]) -> None:
        """Begin with what the `contents` of another layer were; the layer is empty."""
        super().take(contents)
        self.guarded = int(contents.get("guarded", self.guarded))
        self.skip_attention()

    def borrow(self, other: "SparseLayer") -> None:
        """Use another layer's keys and values."""
        self.is_initialized, self.guarded, self.device = True, other.guarded, other.device
        self.scale(other.rules.scaling)
        self.keys, self.values, self.own_from = other.keys, other.values, other.own_from

    def step_bytes(self, length: int, token: int) -> int:
        """Return the bytes that a step reads per sequence; `token` is the size of one token's keys and values."""
        k = self.counts(length)
        return sum(k) * token // len(k) + (self.ranking_bytes(length) if min(k) < length else 0)

    def rewind(self, length: int) -> None:
        """Forget the tokens after the first `length` without moving a buffer."""
        super().rewind(length)
        self.skip_attention()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` of the newest tokens."""
        super().crop(tokens_to_remove)
        self.guarded = min(self.guarded, self.get_seq_length())


class RankingLayer(SparseLayer):
    """A layer that chooses the tokens with the largest rank; a subclass computes the ranks."""

    @abstractmethod
    def rank(self, query: Tensor, visible: Tensor | None) -> Tensor:
        """Return integer ranks `[batch, kv_heads, N]` for queries `[batch, kv_heads, G, head_dim]`; largest is best."""

    def choose(self, query: Tensor, rows: Rows) -> Tensor:
        """Choose the tokens with the largest rank, and those that are always attended: int64, as `decode` returns."""
        visible, rules = rows.valid, self.rules
        valid = None if visible is None else visible.unsqueeze(1)
        k = rows.k.expand(query.shape[:2])
        return select(self.rank(query, visible), k, valid=valid, recent=rules.recent, sink=rules.sink)

    def decode(self, query: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Attend to the chosen tokens in plain torch."""
        chosen = self.choose(query, rows)
        return attend(query, self.state(), rows, chosen, self.rules.scaling), chosen


class DenseLayer(GrowingLayer):
    """A layer whose steps attend to everything.

    The model's own attention computes them, with two exceptions. Where one-token steps run on a CPU, and other layers
    choose or it is faster (`own_from`), BPC's kernel does: torch's SDPA can take several times as long there, and then
    these few layers take a large part of a step. It also computes passes that attend to everything in all layers
    (`attend_to_all`).
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[batch, kv_heads, new, head_dim]`; keys that BPC's kernel may read carry this layer."""
        keys, values = super().update(key_states, value_states)
        served = backend(keys.device)
        if (served == "native" and key_states.shape[2] == 1) or (served != "torch" and self.common.full) or self.apart:
            keys = with_layer(keys, self)
        return keys, values

    def attention(self, call: AttentionCall) -> Tensor | None:
        """Return the attention output `[batch, new, query_heads, head_dim]`; None: use the model's own attention.

        Raises:
            ModelError: BPC cannot read the mask.
        """
        if self.common.full:
            return self.attend_to_all(call)
        rows = None if self.apart else self.rows(call)
        if rows is None:
            return self.attend_few(call)  # no layer chooses: elsewhere the step has the bits of the model's own
        query, state = call.grouped(self.keys.shape[1]), self.state()
        return as_output(find(query, state).dense_decode(query, state, rows, call.scaling))
