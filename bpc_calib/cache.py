"""A transformers cache that keeps a code beside every key and attends to the best-ranked tokens alone."""

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from bpc_artifacts import ProjectionArtifact, check_model
from bpc_calib.codes import check_bits
from bpc_calib.decomposition import decompose
from bpc_calib.encoding import encode
from bpc_calib.errors import InputError, ModelError
from bpc_calib.growing import append
from bpc_calib.models import ModelDescription, describe
from bpc_calib.scoring import hash_scores, quantize_query
from bpc_calib.selection import attended, select
from bpc_calib.sparse_attention import sparse_attention

__all__ = ["BPCCache", "BPCLayer", "check_layers"]

logger = logging.getLogger(__name__)

# Steps a bit for projections found in the prompt: it waits for them. The authors' release takes as many.
ONLINE_ITERATIONS = 4
HASHED_AT_ONCE = 1 << 16  # tokens: hashing takes some 20 bytes a bit and key on its way


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

    def __post_init__(self) -> None:
        """Raise `InputError` at the first value out of range."""
        attended(1, self.budget)
        for name, least in (("min_tokens", 1), ("recent", 0), ("sink", 0), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} must be an integer of at least {least}, not {value!r}")
        if (
            isinstance(self.safeguard, bool)
            or not isinstance(self.safeguard, int | float)
            or not 0 <= self.safeguard <= 1
        ):
            raise InputError(f"safeguard must be a share in [0, 1], not {self.safeguard!r}")
        if self.group not in ("max", "sum"):
            raise InputError(f'group must be "max" or "sum", not {self.group!r}')
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


class BPCLayer(GrowingLayer):
    """Keys, values, codes, errors and gains of one layer, and its sparse attention."""

    def __init__(self, index: int, rules: Rules, model: ModelDescription, projection: Tensor | None) -> None:
        super().__init__()
        self.index = index
        self.rules = rules
        self.model = model
        self.calibrated = projection  # float32 [kv_heads, bits, head_dim]; None: online
        self.projection = projection  # the one in use; online: [batch, kv_heads, bits, head_dim]
        self.hashed = 0  # how many tokens have codes
        self.guarded = 0  # how many were cached at the last step of several tokens
        self.served = True  # whether BPC's attention was called since the last update
        self.module: weakref.ref[Any] | None = None

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
        rules = self.rules
        if visible is None:
            length = self.get_seq_length()
            k = attended(length, rules.budget, rules.min_tokens)
            return k if k < length else None
        lengths = visible.sum(-1).tolist()
        wanted = [attended(length, rules.budget, rules.min_tokens) for length in lengths]
        return torch.tensor(wanted, device=visible.device).unsqueeze(-1) if wanted != lengths else None

    def attend(self, query: Tensor, k: int | Tensor, visible: Tensor | None, scale: float | None) -> Tensor:
        """Attention of one new token a sequence, already cached, over the best `k` tokens.

        Args:
            query: `[batch, query_heads, 1, head_dim]`.
            k: as `chosen` gives it.
            visible: bool `[batch, N]`; False is padding. None: no padding.

        Returns:
            `[batch, 1, query_heads, head_dim]`.
        """
        projection = self._hash(visible)
        rules, heads, length = self.rules, self.keys.shape[1], self.get_seq_length()
        grouped = query.squeeze(2).unflatten(1, (heads, -1))
        error = None
        if rules.safeguard:
            error = torch.full_like(self.buffers["error"][:, :, :length], -torch.inf)
            error[:, :, : self.guarded] = self.buffers["error"][:, :, : self.guarded]
        indices = select(
            self.rank(grouped, projection),
            k,
            valid=None if visible is None else visible.unsqueeze(1),
            recent=rules.recent,
            sink=rules.sink,
            error=error,
            safeguard=rules.safeguard,
        )
        return sparse_attention(grouped, self.keys, self.values, indices, scale).flatten(1, 2).unsqueeze(1)

    def rank(self, query: Tensor, projection: Tensor) -> Tensor:
        """Integers `[batch, kv_heads, N]` for queries `[batch, kv_heads, G, head_dim]`: the best is attended first."""
        length = self.get_seq_length()
        gain = self.buffers["gain"][:, :, :length] if self.rules.gain else None
        scores = hash_scores(quantize_query(query, projection), self.buffers["codes"][:, :, :length], gain)
        return scores.amax(-2) if self.rules.group == "max" else scores.sum(-2, dtype=torch.int32)

    def step_bytes(self, length: int, token: int) -> int:
        """Bytes that a step reads a sequence, where the keys and values of a token take `token`."""
        rules, heads = self.rules, self.keys.shape[1]
        k = attended(length, rules.budget, rules.min_tokens)
        bits = rules.bits if self.calibrated is None else self.calibrated.shape[1]
        code = 8 * -(-bits // 64) + rules.gain + 4 * bool(rules.safeguard)
        return k * token + (length * heads * code if k < length else 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` of the newest tokens."""
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        self.hashed, self.guarded = min(self.hashed, length), min(self.guarded, length)
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


class BPCCache(Cache):  # type: ignore[misc]
    """Keys, values and codes of one batch of sequences; give it to an enabled model (`bpc_calib.enable`).

    `model.generate(..., past_key_values=BPCCache(model.config, artifact))`, or a forward pass. A step of
    one new token attends, for each sequence and KV head, to exactly `k = min(N, max(min_tokens, b))` of
    the `N` real tokens cached, itself included: `b = floor(budget * N)` for a float, `b = budget` for an
    int. In this order of right: the newest `recent`, the first `sink`, `floor(safeguard * k)` whose keys
    are coded worst, then the best scores by code (`select`). Steps of several tokens (prefill, chunks,
    the verification of drafts), sliding-window layers and `dense_layers` attend to everything.

    The keys that the safeguard draws from are those cached at the last step of several tokens. Online
    projections (`artifact=None`) are found in the keys cached when the first choice is to be made, and
    stay until nothing is left of them (`reset`, or a `crop` of all).

    Args:
        config: the model's, `model.config`.
        artifact: projections of this model (`bpc_artifacts.load`, `bpc_calib.calibrate`); None: online.
        budget: share of the tokens in (0, 1], or how many.
        min_tokens: never fewer than these, where there are as many.
        safeguard: share of the chosen kept for the keys whose codes fit worst.
        recent: newest tokens always attended.
        sink: first tokens always attended.
        dense_layers: indices of layers that attend to everything.
        group: how the scores of the query heads of a KV head become one: "max" or "sum".
        gain: rank by scores with the gain; False is the paper.
        bits: code length of online projections.
        seed: of the draws of online projections.

    Raises:
        InputError: an argument out of range.
        ModelError: a model that BPC cannot serve.
        ArtifactError: the artifact of another model; names what differs.
    """

    is_compileable = False  # else `generate` compiles by itself on CUDA
    layer_class = BPCLayer  # a subclass that ranks in another way is compared in the same place

    def __init__(
        self,
        config: Any,
        artifact: ProjectionArtifact | None = None,
        *,
        budget: float | int = 0.02,
        min_tokens: int = 128,
        safeguard: float = 0.1,
        recent: int = 1,
        sink: int = 0,
        dense_layers: Sequence[int] = (0, 1),
        group: str = "max",
        gain: bool = True,
        bits: int = 64,
        seed: int = 0,
    ) -> None:
        rules = Rules(budget, min_tokens, safeguard, recent, sink, group, gain, bits, seed)
        model = describe(config)
        sparse = _sparse_layers(model, dense_layers)
        projections: dict[int, Tensor] = {}
        if artifact is not None:
            projections = _projections(artifact, model, bits)

        layer_class = self.layer_class  # not self: a cycle would keep the cache alive

        def fresh() -> list[Any]:
            layers = check_layers(config, model)
            for index in model.full_layers:
                layers[index] = GrowingLayer()
                if index in sparse:
                    layers[index] = layer_class(index, rules, model, projections.get(index))
            return layers

        self._fresh = fresh
        self._first = model.full_layers[0]
        self._last: BPCLayer | None = None  # the last one updated: its attention must be called before the next
        super().__init__(layers=fresh())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Cache the keys and values of a layer and return all of them."""
        last = self._last
        if last is not None and not last.served:
            raise ModelError(
                f"layer {last.index} cached keys without BPC's attention: call bpc_calib.enable(model) before a "
                "BPCCache is used (the model was not enabled or was disabled, the pass before this one failed, or the "
                "model bypasses transformers' attention interface), and begin a new cache"
            )
        layer = self.layers[layer_idx]
        if layer_idx == self._first:
            self._check_level()
        self._last = layer if isinstance(layer, BPCLayer) else None
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _check_level(self) -> None:
        """A pass that failed leaves its tokens in some layers only."""
        lengths = {layer.get_seq_length() for layer in self.layers if isinstance(layer, GrowingLayer)}
        if len(lengths) > 1:
            raise ModelError(
                f"the layers of this cache hold {min(lengths)} to {max(lengths)} tokens: a pass before this one "
                "failed, so begin a new cache"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` of the newest tokens from every layer.

        Raises:
            InputError: a positive number, or a sliding-window layer that no longer has the tokens before them.
        """
        if tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative one")
        for index, layer in enumerate(self.layers):
            full = isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length() >= layer.sliding_window
            if full and not layer.record_past:
                raise InputError(
                    f"crop: layer {index} has a sliding window of {layer.sliding_window} and has forgotten what came "
                    "before; call cache.activate_past_recording() before the tokens that may be taken back"
                )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget every token, online projections and the model, and keep the settings."""
        self.layers = self._fresh()  # the reset of transformers 5.17 keeps the length
        self._last = None

    def activate_past_recording(self) -> None:
        """Called by transformers when a generation starts that drafts tokens and verifies several at once."""
        # The cache is not told what drafts. Where prompt lookup finds nothing, a step has one token; with a model, or
        # layers of the model itself, every step verifies several.
        caller = sys._getframe(1).f_locals
        settings = caller.get("generation_config")
        looks_up = getattr(settings, "prompt_lookup_num_tokens", None) is not None
        if caller.get("assistant_model") is not None or (settings is not None and not looks_up):
            raise InputError(
                "a BPCCache does not serve an assistant model, nor drafts of the model itself: every step would verify "
                "several tokens, and such steps attend to everything; leave it out, or take prompt_lookup_num_tokens"
            )
        super().activate_past_recording()

    def kv_bytes(self, length: int) -> tuple[int, int]:
        """Bytes of the cache that a step reads a sequence when `length` tokens are cached: here, and by full attention.

        Counted are keys, values, codes, gains and errors, not the queries, the masks or what is written. Before
        the first step: 0 and 0.
        """
        read = full = 0
        for layer in self.layers:
            if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
                continue
            heads, dim = layer.keys.shape[1], layer.keys.shape[3]
            token = 2 * heads * dim * layer.keys.element_size()
            seen = min(length, layer.keys.shape[2]) if layer.is_sliding else length
            full += seen * token
            read += layer.step_bytes(length, token) if isinstance(layer, BPCLayer) else seen * token
        return read, full


def check_layers(config: Any, model: ModelDescription) -> list[Any]:
    """transformers' own cache layers for this model, after a check that BPC can stand in for the full ones.

    Raises:
        ModelError: layers that share their keys, or keep them in a way of their own.
    """
    layers = list(DynamicCache(config=config).layers)
    name = f"{model.id} ({model.model_type})"
    if len(layers) != model.num_layers:
        raise ModelError(f"{name}: some layers share their keys and values, which BPC does not serve")
    for index in model.full_layers:
        # A window no smaller than the context is full attention.
        if type(layers[index]) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ModelError(
                f"{name}: layer {index} keeps its keys in a {type(layers[index]).__name__}, which BPC does not serve"
            )
    return layers


def _sparse_layers(model: ModelDescription, dense_layers: Sequence[int]) -> list[int]:
    if not isinstance(dense_layers, Sequence) or isinstance(dense_layers, str):
        raise InputError(f"dense_layers must be a list of layers, such as (0, 1), not {dense_layers!r}")
    for index in dense_layers:
        if not isinstance(index, Integral) or isinstance(index, bool) or not 0 <= index < model.num_layers:
            raise InputError(
                f"dense_layers: {index!r} is no layer of {model.id}, which has 0 to {model.num_layers - 1}"
            )
    sparse = [index for index in model.full_layers if index not in dense_layers]
    if not sparse:
        raise InputError(
            f"dense_layers {list(dense_layers)} leave nothing to do: the full-attention layers of {model.id} are "
            f"{model.full_layers}"
        )
    return sparse


def _projections(artifact: ProjectionArtifact, model: ModelDescription, bits: int) -> dict[int, Tensor]:
    if not isinstance(artifact, ProjectionArtifact):
        raise InputError(f"artifact must be what bpc_artifacts.load returns, not {type(artifact).__name__}")
    for doubt in check_model(artifact, model.metadata()):
        logger.warning("%s", doubt)
    algorithm = artifact.metadata["algorithm"]
    if algorithm["metric"] or algorithm["centred"]:
        raise InputError("the artifact has a query metric or means, which this version does not decode with")
    if bits not in (64, algorithm["bits"]):
        raise InputError(
            f"the artifact's codes have {algorithm['bits']} bits, not {bits}; bits is for online projections"
        )
    return {index: torch.from_numpy(layer.projection) for index, layer in artifact.layers.items()}
