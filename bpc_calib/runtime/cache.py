"""A transformers cache that stores a code for every key and attends only to the best-ranked tokens."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from bpc_artifacts import LayerProjection, ProjectionArtifact, check_model
from bpc_calib.compat import attention_name
from bpc_calib.errors import InputError, ModelError
from bpc_calib.method.codes import default_bits
from bpc_calib.method.defaults import BUDGET, MIN_TOKENS, MOST_DRAFTED
from bpc_calib.method.numbers import check_bits, check_flag, check_seed
from bpc_calib.method.rules import Ranking, Rules, default_dense_layers, ranking_defaults, shares_of
from bpc_calib.models.description import ModelDescription, describe, sparse_layers
from bpc_calib.runtime import saved_cache
from bpc_calib.runtime.agreement import Agreement
from bpc_calib.runtime.bytes_read import KVBytes, count_bytes
from bpc_calib.runtime.drift import ADVICE, NEWEST, calibrated_residuals, hardly_fit, newest_residuals
from bpc_calib.runtime.enabling import PREFIX
from bpc_calib.runtime.hashed_layer import BPCLayer, prepare
from bpc_calib.runtime.kv_device import kv_place
from bpc_calib.runtime.layers import Common, DenseLayer, GrowingLayer, SparseLayer
from bpc_calib.runtime.mapped import check_folder, check_room
from bpc_calib.runtime.served_layers import check_layers, check_undoable, with_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from typing_extensions import Unpack

__all__ = ["BPCCache"]

logger = logging.getLogger(__name__)

AGAIN = "call cache.reset(), or make a new cache, and feed the whole text again"
DRAFTED = 16  # steps in a row that verify drafts, after which a warning says that BPC saves nothing


class BPCCache(Cache):  # type: ignore[misc]
    """Keys, values and codes of one batch of sequences, for an enabled model (`bpc_calib.enable`).

    Pass it to `model.generate(..., cache=BPCCache(model.config, artifact))` or to a forward pass (before transformers
    5.24 as `past_key_values`). A step
    with one new token attends, per sequence and KV head, to exactly `k = min(N, max(min_tokens, b))` of the `N`
    real (not padding) tokens in the cache, the new token included: `b = floor(budget * N)` for a float, `b = budget`
    for an int. The tokens are chosen in this order of priority (`select`): the newest `recent`, the first `sink`,
    the `floor(safeguard * k)` whose keys are coded worst, then those with the best scores by code. Everything is
    attended in steps with several tokens (prefill, chunks, verification of drafts), in sequences with
    `N < min_context`, in sliding-window layers and in `dense_layers`.

    The safeguard chooses among the keys that were cached at the last step with several tokens. Online projections
    (`artifact=None`) are fitted to the keys in the cache when tokens are first chosen, and calibrated ones are adapted
    (`adapt`). The former stay until the cache is empty (`reset`, or a `crop` of all tokens).

    Args:
        config: `model.config`.
        artifact: projections of this model (`bpc_artifacts.load`, `bpc_calib.calibrate`); None: online projections.
        budget: share of the tokens in (0, 1], or a number of tokens.
        min_tokens: lower bound of the number of attended tokens.
        safeguard: share of the attended tokens that is reserved for the keys whose codes fit worst; None: 0.1 for
            projections of the paper's method, else 0 (docs/projections.md).
        recent: number of newest tokens that are always attended; None: 1 for projections of the paper's method,
            else 0.
        sink: number of first tokens that are always attended.
        dense_layers: indices of layers that attend to everything; None: none if the artifact has the needs of the KV
            heads, else the first two.
        equal_shares: whether all KV heads attend to as many tokens, also where the artifact has their needs.
        group: rule that reduces the scores of the query heads of a KV head to one score: "relative" or "max"
            (`group_scores`); None: "max" for projections of the paper's method, else "relative".
        gain: whether scores include the gain; None: False for projections of the paper's method, else True.
        bits: code length of online projections; None: 64, or 128 where `head_dim` is more than 128.
        seed: random seed of online projections.
        adapt: whether a prompt of at least 512 tokens adapts the artifact's projections before its keys are hashed: in
            the metric of its keys, its own queries then count as much as those of calibration. Later prompts adapt them
            again whenever they have doubled the cache.
        min_context: a sequence with fewer real tokens in the cache attends to all of them; None: up to the length
            where that is faster (`sparse_from`).
        kv_device: where the keys and values of layers with full attention are kept: "cpu", in main memory, or
            "disk:FOLDER", in memory-mapped files there. The CPU attends to them, wherever the model and the codes are.
            None: where the model is.

    Raises:
        InputError: an argument is out of range, or the folder cannot hold files.
        ModelError: BPC cannot serve the model.
        ArtifactError: the artifact belongs to another model; the message names the difference.
    """

    is_compileable = False  # otherwise `generate` compiles the model on CUDA by default
    layer_class: type[SparseLayer] = BPCLayer  # a subclass of BPCCache sets another to rank tokens differently

    def __init__(
        self,
        config: "PreTrainedConfig",
        artifact: ProjectionArtifact | None = None,
        *,
        budget: float | int = BUDGET,
        min_tokens: int = MIN_TOKENS,
        dense_layers: Sequence[int] | None = None,
        equal_shares: bool = False,
        min_context: int | None = None,
        bits: int | None = None,
        seed: int = 0,
        adapt: bool = True,
        kv_device: str | None = None,
        **ranking: "Unpack[Ranking]",
    ) -> None:
        given = {name: value for name, value in ranking.items() if value is not None}
        if unknown := ranking.keys() - Ranking.__annotations__.keys():
            raise TypeError(f"BPCCache got an unexpected argument {min(unknown)!r}")
        model = describe(config)
        rules = Rules(
            budget=budget,
            min_tokens=min_tokens,
            min_context=0 if min_context is None else min_context,
            **(ranking_defaults(artifact) | given),
        )
        check_seed(seed)
        for name, flag in (("equal_shares", equal_shares), ("adapt", adapt)):
            check_flag(name, flag)
        place = kv_place(kv_device)
        if place is not None and place.folder is not None:
            check_folder(place.folder)
        if bits is not None:
            check_bits(bits)
        projections: Mapping[int, LayerProjection] = {}
        if artifact is not None:  # first: one made for another model would be told to lack layers
            projections = _projections(artifact, model, bits)
        default = default_dense_layers(artifact, model.num_layers)
        sparse = sparse_layers(model, default if dense_layers is None else dense_layers)
        shares = {} if equal_shares else shares_of(artifact, sparse)

        layer_class = self.layer_class  # not self: a cycle would keep the cache alive

        own_bits = default_bits(model.head_dim) if bits is None else bits
        self.artifact = artifact
        self.settings: dict[str, Any] = {  # what `save` writes and `open` takes
            "budget": budget,
            "min_tokens": min_tokens,
            "dense_layers": None if dense_layers is None else list(dense_layers),
            "equal_shares": equal_shares,
            "min_context": min_context,
            "bits": bits,
            "seed": seed,
            "adapt": adapt,
            **given,
        }

        def fresh() -> list[Any]:
            layers = check_layers(config, model)
            common = Common(model, own_bits, seed, adapt, tuple(sorted(sparse)), min_context is None, place)
            for index in model.full_layers:
                layers[index] = DenseLayer(rules, common)
                if index in sparse:
                    own = replace(rules, shares=shares.get(index))
                    layers[index] = layer_class(index, own, common, projections.get(index))
            return layers

        self._fresh, self.kv_device = fresh, kv_device
        self._full, self._sparse = model.full_layers[0], sparse[0]
        self._last: SparseLayer | None = None  # updated last; its attention must run before the next layer's update
        self._thread: int | None = None  # began the last pass
        self._verified: int | None = None  # passes in a row that verified drafts; None: there are no drafts
        self._calibrated = calibrated_residuals(artifact)
        self._measured = 0  # hashed tokens when residuals were last measured
        self._advised = False  # whether a warning said that the projections hardly fit
        self.agreement = Agreement()  # of `exact_decoding` and `checked_decoding`
        super().__init__(layers=fresh())
        self._keeping = with_tokens(self.layers)  # whose update a pass calls, in this order

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values to a layer and return all that it holds, `[batch, kv_heads, N, head_dim]` each.

        Args:
            key_states: `[batch, kv_heads, new, head_dim]`.
            value_states: the same shape as the keys.
            layer_idx: the layer, from 0.

        Raises:
            ModelError: the model is not enabled, an earlier pass failed, or the model bypasses transformers' attention
                interface.
            InputError: another thread uses the cache, the keys have another dtype, device or batch size than it has, or
                the disk is full.
        """
        layer, last = self.layers[layer_idx], self._last
        if layer_idx == self._keeping[0]:
            self._begin(layer, key_states)
        elif last is not None and not last.served:
            raise _unserved(last)
        if self.kv_device is not None:
            self._take_room(layer_idx, key_states)
        self._last = layer if isinstance(layer, SparseLayer) else None
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _take_room(self, layer_idx: int, keys: Tensor) -> None:
        """Take disk space for a pass in all layers, before the first of them changes."""
        if layer_idx == (self._keeping[0] if self.layers[self._full].get_seq_length() else self._full):
            growing = [each for each in self.layers if isinstance(each, GrowingLayer)]
            check_room([each.file for each in growing if each.file], growing[0].get_seq_length() + keys.shape[2])
            for each in growing:
                each.take_room(keys)

    def _begin(self, first: Any, keys: Tensor) -> None:
        """Begin a pass with these keys of the first layer, or raise before they change anything."""
        module = self._module()
        if module is not None and not (name := attention_name(module.config) or "").startswith(PREFIX):
            raise ModelError(
                f"the attention of the model of this cache is now {name}, not BPC's (set_attn_implementation undoes "
                "enable): call bpc_calib.enable(model) again; the cache is as before"
            )
        held = [self.layers[index].get_seq_length() for index in (self._keeping[0], self._full, self._keeping[-1])]
        most, least = max(held), min(held)
        last, thread = self._last, get_ident()
        unserved = last is not None and not last.served
        if unserved or most != least:  # a failed pass leaves its tokens in the first layers only
            if thread != self._thread:
                raise InputError(
                    "a pass that another thread began with this cache is running or has failed: use a cache in one "
                    f"thread at a time, and after a failure {AGAIN}"
                )
            if last is not None and unserved and module is None:
                raise _unserved(last)
            raise ModelError(
                f"an earlier pass with this cache failed, whose first layer holds {most} tokens and the last {least}: "
                f"{AGAIN}"
            )
        if most:
            batch, dtype, device = first.keys.shape[0], first.keys.dtype, first.device
            if (dtype, device) != (keys.dtype, keys.device):
                raise InputError(
                    f"the cache holds {dtype} on {device}, but the new keys are {keys.dtype} on {keys.device}: {AGAIN}"
                )
            if batch != keys.shape[0]:
                raise InputError(f"the cache holds {batch} sequences, but the new tokens are of {keys.shape[0]}")
        self._thread = thread
        self._count_drafts(keys.shape[2])
        self._watch()

    def _module(self) -> Any:
        """The attention module that BPC served with this cache before; None if there is none yet."""
        reference = getattr(self.layers[self._sparse], "module", None)
        return None if reference is None else reference()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` of the newest tokens from every layer.

        Raises:
            InputError: the number is positive, or a sliding-window layer no longer has the tokens that come before.
            ModelError: a layer keeps one state of all tokens.
        """
        if tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative number")
        check_undoable(self.layers, "no token can be removed; call reset")
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DynamicSlidingWindowLayer) and not _has_before(layer, -tokens_to_remove):
                raise InputError(
                    f"crop: layer {index} has a sliding window of {layer.sliding_window} and no longer has the earlier "
                    "tokens; call cache.activate_past_recording() before you feed tokens that you may remove"
                )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget every token, the online projections and the model; keep the settings."""
        self._check_free()
        self.layers = self._fresh()  # because the reset of transformers 5.17 keeps the length
        self._last, self._verified, self._thread = None, None, None
        self.agreement = Agreement()
        self.set_budget(self.settings["budget"])

    def _check_free(self) -> None:
        for layer in self.layers:
            if isinstance(layer, GrowingLayer):
                layer.check_free()

    def activate_past_recording(self) -> None:
        """Prepare for removing drafted tokens; transformers calls this when it starts a generation with drafts."""
        self._verified = 0
        super().activate_past_recording()

    def _count_drafts(self, tokens: int) -> None:
        """Warn once if step after step verifies drafts, as with an assistant model.

        transformers does not pass on to a cache who drafts. With prompt lookup, a step without a match has one token.
        """
        if self._verified is None:
            return
        self._verified = self._verified + 1 if 1 < tokens <= MOST_DRAFTED + 1 else 0  # longer passes are prompts
        if self._verified > DRAFTED:
            self._verified = None
            logger.warning(
                "the last %d steps each verified several drafted tokens, and such steps attend to everything, so BPC "
                "saves nothing: leave out the assistant model, or use prompt_lookup_num_tokens",
                DRAFTED,
            )

    def _watch(self) -> None:
        """Measure residuals each time that `NEWEST` tokens were hashed."""
        hashed = next((layer.hashed for layer in self.layers if isinstance(layer, BPCLayer)), self._measured)
        if self._calibrated and not self._advised and abs(hashed - self._measured) >= NEWEST:
            self.residuals()
            self._measured = hashed

    def residuals(self) -> dict[int, tuple[float, float]]:
        """Return by layer how much of the length of the newest keys their codes leave unexplained, from 0 to about 1.

        The length is at least that of the keys that calibration saw, where the artifact has it.
        The second number of each pair is what calibration saw: on the samples that it kept aside, else on the fitted
        keys. Both are means over KV heads, and the first one over sequences, of one in four of the newest 256 hashed
        tokens, padding included. Layers without codes are missing. So all are missing with online projections, of
        which no keys were kept aside, and inside of `static_steps`.

        The cache measures by itself after every 256 hashed tokens outside of `static_steps`. If the mean over the
        layers is far beyond the calibration's, a warning says so, once per cache.
        """
        found = newest_residuals([layer for layer in self.layers if isinstance(layer, BPCLayer)], self._calibrated)
        if not self._advised and hardly_fit(found):
            self._advised = True
            logger.warning(ADVICE)
        return found

    def save(
        self,
        path: "str | PathLike[str]",
        model: "PreTrainedModel",
        tokens: Tensor,
        *,
        about: Mapping[str, Any] = MappingProxyType({}),
        overwrite: bool = False,
    ) -> int:
        """Write the cache to a file, for `BPCCache.open`; return its size in bytes.

        The file has the keys and values, their codes, online or adapted projections, the settings and the tokens, but
        not the artifact. It appears in one step, and a failure leaves an earlier file as it was.

        Args:
            path: of the file, in safetensors format.
            model: whose cache this is; its config and a sample of its weights are noted.
            tokens: integers `[batch, T]`, of the text so far: those of the cache, and maybe newer ones.
            about: what else the file shall keep, as JSON.
            overwrite: whether an existing saved cache is replaced; another kind of file never is.

        Raises:
            CacheFileError: the file exists or cannot be written; nothing changed.
            InputError: the cache is empty, or the tokens are not of it.
            ModelError: the model keeps something else than keys and values, or several processes share it.
        """
        return saved_cache.write(path, self, model, tokens, about, overwrite)

    @classmethod
    def open(
        cls,
        path: "str | PathLike[str]",
        model: "PreTrainedModel",
        artifact: ProjectionArtifact | None = None,
        **settings: Any,
    ) -> tuple["BPCCache", Tensor]:
        """Return the cache that `save` wrote, and the tokens: `model.generate(tokens, cache=cache)` goes on.

        Args:
            path: of the file.
            model: the model that the cache was saved with, in the same dtype.
            artifact: the projections; with others than it was saved with, the first step hashes all keys again.
            settings: arguments of `BPCCache` to change; the others are as they were.

        Raises:
            CacheFileError: the file cannot be read, is damaged, or belongs to another model.
            InputError, ModelError, ArtifactError: as `BPCCache(...)`.
        """
        with saved_cache.opened(path, model) as saved:
            cache = cls(model.config, artifact, **(saved.settings() | settings))
            saved.fill(cache, model.device)
        return cache, saved.tokens.to(model.device)

    @property
    def min_context(self) -> int:
        """A sequence with fewer real tokens attends to all of them; known after the first tokens, where not given."""
        return next(int(layer.rules.min_context) for layer in self.layers if isinstance(layer, GrowingLayer))

    def set_budget(self, budget: float | int) -> None:
        """Change the budget (share or number of tokens) from the next step on.

        Raises:
            InputError: the budget is out of range, or the cache is in a `static_steps` block; nothing changed.
        """
        self._check_free()
        growing = [layer for layer in self.layers if isinstance(layer, GrowingLayer)]
        changed = [replace(layer.rules, budget=budget) for layer in growing]
        for layer, rules in zip(growing, changed, strict=True):
            layer.rules = rules
        self.settings["budget"] = budget

    def rewind(self, length: int) -> None:
        """Forget the tokens after the first `length`, without moving a buffer, so that the same step can run again.

        Codes and the safeguard's list stay as they are; use `crop` before other text follows. Sliding-window layers
        keep the same tokens, as if they were those before.

        Raises:
            InputError: the cache has fewer tokens, or is in a `static_steps` block.
            ModelError: a layer keeps one state of all tokens.
        """
        self._check_free()
        check_undoable(self.layers, "the cache cannot be rewound")
        if not 0 <= length <= self.get_seq_length():
            raise InputError(f"rewind({length}): the cache has {self.get_seq_length()} tokens")
        for layer in self.layers:
            if isinstance(layer, GrowingLayer):
                layer.rewind(length)
            else:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
                layer.cumulative_length = length

    @contextmanager
    def full_attention(self, on: bool = True) -> Iterator[None]:
        """Attend to everything inside this block, in passes that are no prompts."""
        common = self.layers[self._sparse].common
        common.full, before = on, common.full
        try:
            yield
        finally:
            common.full = before

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Forget what passes inside this block cached, as if it had never been; also after one that failed."""
        length = self.get_seq_length()
        before = [(layer, dict(vars(layer))) for layer in self.layers if isinstance(layer, DynamicSlidingWindowLayer)]
        try:
            yield
        finally:
            for layer, kept in before:  # a pass replaces their tensors
                vars(layer).update(kept)
            self.back(length)

    def record(self) -> None:
        """Have sliding windows keep what the next pass pushes out, so that `back` can undo a part of that pass."""
        for layer in self.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()

    def back(self, length: int) -> None:
        """Forget the tokens after the first `length`, as if they had never been; also of a pass that failed.

        With sliding windows these must be of one pass, after `record`.
        """
        for layer in self.layers:
            more = max(0, layer.get_seq_length() - length)
            if isinstance(layer, GrowingLayer):
                if more:
                    layer.rewind(length)
            elif isinstance(layer, DynamicSlidingWindowLayer) and layer.record_past:
                layer.crop(-more)
                layer.record_past = False
            if isinstance(layer, SparseLayer):
                layer.skip_attention()

    def kv_bytes(self, length: int) -> tuple[int, int]:
        """Return the bytes that a step reads per sequence at `length` cached tokens: here, and with full attention.

        The count includes keys, values, codes, gains and the safeguard's list. It excludes queries, masks and
        everything that is written. Before the first step the result is `(0, 0)`.
        """
        counted = self.kv_parts(length)
        return counted.read, counted.full

    def kv_parts(self, length: int) -> KVBytes:
        """Return the bytes of `kv_bytes` by what they are: `sliding`, `dense`, `ranking`, `chosen`, `minimum`."""
        return count_bytes(self.layers, length)

    def prepare(self, attention_mask: Tensor | None = None) -> None:
        """Hash the cached tokens now, and find online projections, where the next one-token step would do it first.

        Call it between the prefill and the first step, to measure or to choose when this is done. A later call hashes
        only what is new. Online projections found here miss the key of the first new token, which the step includes.

        Args:
            attention_mask: bool or integers `[batch, N]` for the `N` cached tokens, 0 for padding; None: no padding.

        Raises:
            InputError: the mask does not fit the cache.
        """
        prepare([layer for layer in self.layers if isinstance(layer, BPCLayer)], attention_mask)


def _has_before(layer: DynamicSlidingWindowLayer, removed: int) -> bool:
    """Whether a sliding window has the tokens that it had before the newest `removed` ones came."""
    length, window = layer.get_seq_length(), layer.sliding_window
    recorded = layer.record_past or length < window
    return bool(recorded and layer.keys.shape[2] - removed >= min(window - 1, length - removed))


def _unserved(layer: SparseLayer) -> ModelError:
    return ModelError(
        f"layer {layer.index} cached keys without BPC's attention: call bpc_calib.enable(model) before you use a "
        "BPCCache, and start a new cache (the model was not enabled or was disabled, the first pass failed, or the "
        "model bypasses transformers' attention interface)"
    )


def _projections(
    artifact: ProjectionArtifact, model: ModelDescription, bits: int | None
) -> Mapping[int, LayerProjection]:
    for warning in check_model(artifact, model.metadata()):
        logger.warning("%s", warning)
    artifact_bits = artifact.metadata["algorithm"]["bits"]
    if bits not in (None, artifact_bits):
        raise InputError(f"the artifact's codes have {artifact_bits} bits, not {bits}; bits is for online projections")
    return artifact.layers
