"""A transformers cache that keeps a code beside every key and attends to the best-ranked tokens alone."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from bpc_artifacts import LayerProjection, ProjectionArtifact, check_model
from bpc_calib.compat import drafts_by_model
from bpc_calib.errors import InputError, ModelError
from bpc_calib.models.description import ModelDescription, describe
from bpc_calib.runtime.hashed_layer import BPCLayer
from bpc_calib.runtime.layers import GrowingLayer, SparseLayer
from bpc_calib.runtime.rules import Ranking, Rules, ranking_defaults

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["BPCCache", "check_layers"]

logger = logging.getLogger(__name__)


class BPCCache(Cache):  # type: ignore[misc]
    """Keys, values and codes of one batch of sequences; give it to an enabled model (`bpc_calib.enable`).

    `model.generate(..., past_key_values=BPCCache(model.config, artifact))`, or a forward pass. A step of
    one new token attends, for each sequence and KV head, to exactly `k = min(N, max(min_tokens, b))` of
    the `N` real tokens cached, itself included: `b = floor(budget * N)` for a float, `b = budget` for an
    int. In this order of right: the newest `recent`, the first `sink`, `floor(safeguard * k)` whose keys
    are coded worst, then the best scores by code (`select`). Steps of several tokens (prefill, chunks,
    the verification of drafts), sequences of `N < min_context`, sliding-window layers and `dense_layers` attend to
    everything.

    The keys that the safeguard draws from are those cached at the last step of several tokens. Online
    projections (`artifact=None`) are found in the keys cached when the first choice is to be made, and
    stay until nothing is left of them (`reset`, or a `crop` of all).

    Args:
        config: the model's, `model.config`.
        artifact: projections of this model (`bpc_artifacts.load`, `bpc_calib.calibrate`); None: online.
        budget: share of the tokens in (0, 1], or how many.
        min_tokens: never fewer than these, where there are as many.
        safeguard: share of the chosen kept for the keys whose codes fit worst; None: 0.1 for projections of the
            paper's method, else none (docs/projections.md).
        recent: newest tokens always attended; None: 1 for projections of the paper's method, else none.
        sink: first tokens always attended.
        dense_layers: indices of layers that attend to everything.
        group: how the scores of the query heads of a KV head become one: "relative", "max" or "sum" (`group_scores`);
            None: "max" for projections of the paper's method, else "relative".
        gain: rank by scores with the gain; None: not for projections of the paper's method.
        bits: code length of online projections.
        seed: of the draws of online projections.
        min_context: a sequence with fewer real tokens cached attends to all of them; where that is faster than
            choosing, `bpc bench --crossover` measures.

    Raises:
        InputError: an argument out of range.
        ModelError: a model that BPC cannot serve.
        ArtifactError: the artifact of another model; names what differs.
    """

    is_compileable = False  # else `generate` compiles by itself on CUDA
    layer_class: type[SparseLayer] = BPCLayer  # a subclass that ranks in another way is compared in the same place

    def __init__(
        self,
        config: Any,
        artifact: ProjectionArtifact | None = None,
        *,
        budget: float | int = 0.02,
        min_tokens: int = 128,
        dense_layers: Sequence[int] = (0, 1),
        min_context: int = 0,
        bits: int = 64,
        seed: int = 0,
        **ranking: "Unpack[Ranking]",
    ) -> None:
        given = {name: value for name, value in ranking.items() if value is not None}
        if unknown := ranking.keys() - Ranking.__annotations__.keys():
            raise TypeError(f"BPCCache got an unexpected argument {min(unknown)!r}")
        rules = Rules(
            budget=budget, min_tokens=min_tokens, min_context=min_context, bits=bits, seed=seed,
            **(ranking_defaults(artifact) | given),
        )  # fmt: skip
        model = describe(config)
        sparse = _sparse_layers(model, dense_layers)
        rules = replace(rules, layers=tuple(sorted(sparse)))
        projections: Mapping[int, LayerProjection] = {}
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
        self._last: SparseLayer | None = None  # the last one updated: its attention must be called before the next
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
        self._last = layer if isinstance(layer, SparseLayer) else None
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
        # Where prompt lookup finds nothing, a step has one token; with a model every step verifies several.
        if drafts_by_model():
            raise InputError(
                "a BPCCache does not serve an assistant model, nor drafts of the model itself: every step would verify "
                "several tokens, and such steps attend to everything; leave it out, or take prompt_lookup_num_tokens"
            )
        super().activate_past_recording()

    def set_budget(self, budget: float | int) -> None:
        """Attend to another share or number of the tokens from the next step on."""
        for layer in self.layers:
            if isinstance(layer, SparseLayer):
                layer.rules = replace(layer.rules, budget=budget)

    def rewind(self, length: int) -> None:
        """Forget the tokens after the first `length` as if they had never come; no buffer moves.

        Codes and the safeguard's list stay as they are, so a step can be taken again: `crop` is for other text.
        Sliding windows keep the newest tokens, which are as many.
        """
        for layer in self.layers:
            if isinstance(layer, GrowingLayer):
                layer.rewind(length)

    def kv_bytes(self, length: int) -> tuple[int, int]:
        """Bytes of the cache that a step reads a sequence when `length` tokens are cached: here, and by full attention.

        Counted are keys, values, codes, gains and the safeguard's list, not the queries, the masks or what is
        written. Before the first step: 0 and 0.
        """
        read = full = 0
        for each in self.layers:
            layer = getattr(each, "layer", each)  # below a static one
            if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
                continue
            heads, dim = layer.keys.shape[1], layer.keys.shape[3]
            token = 2 * heads * dim * layer.keys.element_size()
            seen = min(length, layer.keys.shape[2]) if layer.is_sliding else length
            full += seen * token
            read += layer.step_bytes(length, token) if isinstance(layer, SparseLayer) else seen * token
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


def _projections(artifact: ProjectionArtifact, model: ModelDescription, bits: int) -> Mapping[int, LayerProjection]:
    for doubt in check_model(artifact, model.metadata()):
        logger.warning("%s", doubt)
    found = artifact.metadata["algorithm"]["bits"]
    if bits not in (64, found):
        raise InputError(f"the artifact's codes have {found} bits, not {bits}; bits is for online projections")
    return artifact.layers
